// Memory of the device is memory of the host. What is allocated or freed is poisoned as early as a real allocator might
// hand it to somebody else: a reader that is too late finds NaNs.
#include "device.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fake_device {
namespace {

constexpr size_t kAlignment = 512;

// Pieces of memory by their first byte.
class Regions {
 public:
  void add(const void* begin, size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[static_cast<const char*>(begin)] = size;
  }
  void remove(const void* begin) {
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_.erase(static_cast<const char*>(begin));
  }
  bool contains(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto behind = sizes_.upper_bound(static_cast<const char*>(pointer));
    if (behind == sizes_.begin()) return false;
    auto [begin, size] = *--behind;
    return static_cast<const char*>(pointer) < begin + size;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> sizes_;
};

Regions& device_regions() {
  static auto* regions = new Regions;
  return *regions;
}
Regions& pinned_regions() {
  static auto* regions = new Regions;
  return *regions;
}

size_t rounded(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

void* new_memory(size_t size, Regions& regions) {
  void* begin = std::aligned_alloc(kAlignment, rounded(size));
  if (begin == nullptr) return nullptr;
  std::memset(begin, kPoison, rounded(size));
  regions.add(begin, rounded(size));
  return begin;
}

void delete_memory(void* begin, Regions& regions) {
  if (begin == nullptr) return;
  synchronize_all();
  regions.remove(begin);
  std::free(begin);
}

// Does for torch what its caching allocator does, in the order that shows most.
//
// Freed memory goes back to the pool of the stream that it was allocated in. With the next allocation from that pool
// all of it is poisoned, in the order of that stream: any of it might be what is allocated, and written to. Memory that
// was recorded for other streams goes back when they have done what they had when it was freed. The last memory to come
// back is the first to be handed out again.
class Allocator {
 public:
  void* allocate(size_t size, Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    take_back(stream);
    auto& free = free_[{&stream, rounded(size)}];
    void* begin;
    if (free.empty()) {
      begin = new_memory(size, device_regions());
    } else {
      begin = free.back();
      free.pop_back();
    }
    blocks_[begin] = {&stream, rounded(size), {}};
    return begin;
  }

  void free(void* begin) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(begin);
    if (found == blocks_.end()) return;
    Freed freed{begin, std::move(found->second), {}};
    blocks_.erase(found);
    for (Stream* stream : freed.block.users) freed.ends.emplace_back(stream, stream->end());
    freed_.push_back(std::move(freed));
  }

  void record(void* begin, Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(begin);
    if (found != blocks_.end() && found->second.pool != &stream) found->second.users.insert(&stream);
  }

  // Poisons all memory that is free, while all streams are idle: what an earlier run has left there may be right.
  void poison_free() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& freed : freed_) std::memset(freed.begin, kPoison, freed.block.size);
    for (const auto& [pool_and_size, blocks] : free_)
      for (void* begin : blocks) std::memset(begin, kPoison, pool_and_size.second);
  }

 private:
  struct Block {
    Stream* pool;
    size_t size;
    std::set<Stream*> users;
  };
  struct Freed {
    void* begin;
    Block block;
    std::vector<std::pair<Stream*, Position>> ends;

    bool is_done() const {
      for (auto [stream, position] : ends)
        if (!stream->has_passed(position)) return false;
      return true;
    }
  };

  void take_back(Stream& pool) {
    std::vector<Freed> others;
    for (auto& freed : freed_) {
      if (freed.block.pool != &pool || !freed.is_done()) {
        others.push_back(std::move(freed));
        continue;
      }
      void* begin = freed.begin;
      size_t size = freed.block.size;
      pool.enqueue([=] { std::memset(begin, kPoison, size); });
      free_[{&pool, size}].push_back(begin);
    }
    freed_ = std::move(others);
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::vector<Freed> freed_;
  std::map<std::pair<Stream*, size_t>, std::vector<void*>> free_;
};

Allocator& allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void copy(void* to, const void* from, size_t size, Stream& stream) {
  bool from_pageable = !is_device_memory(from) && !is_pinned_memory(from);
  if (from_pageable) {  // the driver has taken it when the call returns
    auto bytes = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(bytes, bytes + size);
    stream.enqueue([=] { std::memcpy(to, staged->data(), size); });
    return;
  }
  Position position = stream.enqueue([=] { std::memcpy(to, from, size); });
  bool to_pageable = !is_device_memory(to) && !is_pinned_memory(to);
  if (to_pageable) stream.wait_for(position);
}

}  // namespace

void* allocate(size_t size, Stream& stream) { return allocator().allocate(size, stream); }
void free(void* begin) { allocator().free(begin); }
void record_stream(void* begin, Stream& stream) { allocator().record(begin, stream); }
void poison_free_memory() { allocator().poison_free(); }

bool is_device_memory(const void* pointer) { return device_regions().contains(pointer); }
bool is_pinned_memory(const void* pointer) { return pinned_regions().contains(pointer); }

}  // namespace fake_device

using namespace fake_device;

DEVICE_API cudaError_t cudaMalloc(void** begin, size_t size) {
  *begin = new_memory(size, device_regions());
  return *begin == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
DEVICE_API cudaError_t cudaFree(void* begin) {
  delete_memory(begin, device_regions());
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaHostAlloc(void** begin, size_t size, unsigned) {
  *begin = new_memory(size, pinned_regions());
  return *begin == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
DEVICE_API cudaError_t cudaMallocHost(void** begin, size_t size) { return cudaHostAlloc(begin, size, 0); }
DEVICE_API cudaError_t cudaFreeHost(void* begin) {
  delete_memory(begin, pinned_regions());
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaHostRegister(void* begin, size_t size, unsigned) {
  pinned_regions().add(begin, size);
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaHostUnregister(void* begin) {
  pinned_regions().remove(begin);
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{16} << 30;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = is_device_memory(pointer)   ? cudaMemoryTypeDevice
                     : is_pinned_memory(pointer) ? cudaMemoryTypeHost
                                                 : cudaMemoryTypeUnregistered;
  attributes->device = current_device();
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  copy(to, from, size, stream_of(stream));
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  copy(to, from, size, default_stream());
  return cudaStreamSynchronize(nullptr);
}
DEVICE_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  copy(to, from, size, stream_of(stream));
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaMemsetAsync(void* begin, int value, size_t size, cudaStream_t stream) {
  stream_of(stream).enqueue([=] { std::memset(begin, value, size); });
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaMemset(void* begin, int value, size_t size) {
  return cudaMemsetAsync(begin, value, size, nullptr);
}
