// Makes torch take its memory from the fake device instead of from its caching allocator.
#include "device.h"

#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <memory>

namespace {

using torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

void* take_memory(size_t size, int, cudaStream_t stream) {
  return size == 0 ? nullptr : fake_device::allocate(size, fake_device::stream_of(stream));
}

void give_memory_back(void* begin, size_t, int, cudaStream_t) { fake_device::free(begin); }

class Allocator : public CUDAPluggableAllocator {
 public:
  Allocator() : CUDAPluggableAllocator(take_memory, give_memory_back) {
    set_record_stream_fn(
        [](void* begin, cudaStream_t stream) { fake_device::record_stream(begin, fake_device::stream_of(stream)); });
  }

  // ProcessGroupNCCL wants to hear of all memory, so as to register it with NCCL. There is nothing to register.
  c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(c10::cuda::MempoolId_t, bool) override { return {}; }
  void attachAllocatorTraceTracker(c10::cuda::CUDACachingAllocator::AllocatorTraceTracker) override {}

  // Memory is not counted.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

}  // namespace

// Must be called before anything is allocated.
DEVICE_API void fake_device_take_allocations() {
  torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(std::make_shared<Allocator>());
}
