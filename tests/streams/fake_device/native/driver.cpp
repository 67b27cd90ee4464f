// What torch's libraries want of the driver, libcuda.so.1: there is a context, and nothing can be compiled or launched.
//
// CUDA's header is not included, as it gives several of these functions other names.
#define DRIVER_API extern "C"

namespace {

constexpr int kSuccess = 0, kNotSupported = 801;
char context;  // its address stands for it

}  // namespace

DRIVER_API int cuCtxGetCurrent(void** current) {
  *current = &context;
  return kSuccess;
}
DRIVER_API int cuCtxSetCurrent(void*) { return kSuccess; }
DRIVER_API int cuDeviceGet(int* device, int number) {
  *device = number;
  return kSuccess;
}
DRIVER_API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return kSuccess;
}
DRIVER_API int cuDevicePrimaryCtxRetain(void** retained, int) { return cuCtxGetCurrent(retained); }
DRIVER_API int cuGetErrorString(int, const char** text) {
  *text = "an error of the fake driver";
  return kSuccess;
}

#define NOT_SUPPORTED(name) \
  DRIVER_API int name() { return kNotSupported; }

NOT_SUPPORTED(cuDeviceGetAttribute)
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernel)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleGetFunction)
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadData)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED(cuPointerGetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
