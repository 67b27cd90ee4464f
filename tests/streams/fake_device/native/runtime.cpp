// Devices and their properties, and the kernels in torch's libraries, of which none can run here.
#include "device.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>

namespace fake_device {
namespace {

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;

constexpr int kMajor = 9, kMinor = 0, kWarpSize = 32, kThreadsPerBlock = 1024, kMultiprocessors = 132;

std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}

// A kernel of torch that was launched is one of an operator without a stand-in in operators.cpp.
cudaError_t refuse(const void* kernel) {
  auto found = kernel_names().find(kernel);
  const char* name = found == kernel_names().end() ? "of unknown name" : found->second.c_str();
  std::fprintf(stderr, "The fake device cannot run the kernel %s\n", name);
  return last_error = cudaErrorNotSupported;
}

}  // namespace

int current_device() { return device; }

}  // namespace fake_device

using namespace fake_device;

DEVICE_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = kNumDevices;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaGetDevice(int* number) {
  *number = device;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaSetDevice(int number) {
  device = number;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
DEVICE_API cudaError_t cudaPeekAtLastError() { return last_error; }
DEVICE_API const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNotReady ? "not ready" : "an error of the fake device";
}
DEVICE_API const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheFakeDevice"; }

DEVICE_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "fake device");
  properties->pciBusID = number;
  properties->major = kMajor;
  properties->minor = kMinor;
  properties->totalGlobalMem = size_t{16} << 30;
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = kWarpSize;
  properties->maxThreadsPerBlock = kThreadsPerBlock;
  properties->maxThreadsPerMultiProcessor = 2 * kThreadsPerBlock;
  properties->sharedMemPerBlock = 48 << 10;
  properties->regsPerMultiprocessor = properties->regsPerBlock = 1 << 16;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kThreadsPerBlock;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 0xffff;
  properties->l2CacheSize = 50 << 20;
  properties->unifiedAddressing = properties->concurrentKernels = 1;
  properties->textureAlignment = 512;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = kMajor; break;
    case cudaDevAttrComputeCapabilityMinor: *value = kMinor; break;
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrWarpSize: *value = kWarpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = kThreadsPerBlock; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int number) {
  std::snprintf(id, size, "0000:%02d:00.0", number + 1);
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
DEVICE_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// What compiled CUDA code calls when its library is loaded, and around each launch.
DEVICE_API void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
DEVICE_API void __cudaRegisterFatBinaryEnd(void**) {}
DEVICE_API void __cudaUnregisterFatBinary(void**) {}
DEVICE_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
DEVICE_API void __cudaRegisterFunction(
    void**, const char* kernel, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernel_names()[kernel] = name;
}
DEVICE_API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
DEVICE_API cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
DEVICE_API cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  *handle = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
DEVICE_API cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(handle);
}
DEVICE_API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(kernel);
}
DEVICE_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return refuse(kernel);
}
