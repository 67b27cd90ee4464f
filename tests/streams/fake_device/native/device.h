// What the parts of the fake device share: streams, and the memory that is known to be the device's or pinned.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#define DEVICE_API extern "C"

namespace fake_device {

using Work = std::function<void()>;
using Position = uint64_t;

constexpr int kNumDevices = 8;
constexpr unsigned char kPoison = 0xff;  // a NaN in every floating-point type, and -1 in signed integers

// A queue of work that a thread of its own runs in order.
//
// A schedule decides when. Without one, the thread runs whatever there is. With one, a stream is either prompt or late.
// Whoever enqueues work in a prompt stream goes on when that work has been done: it runs as early as its waits allow. A
// late stream does nothing until somebody waits for it, and then no more than what is waited for. So if one stream is
// prompt and all others are late, its work runs before everything that it does not wait for: each wait that is missing
// in it shows, in every run, without any dependence on time.
class Stream {
 public:
  Stream(int device, int priority);

  // Adds work, and returns its position. The host never waits for work that `depends_on_peers`.
  Position enqueue(Work work, bool depends_on_peers = false);
  // Waits until the work at a position and all before it have been done, and makes a late stream do them.
  void wait_for(Position position);
  bool has_passed(Position position);
  // Returns the position of the last work.
  Position end();

  const int device;
  const int priority;

 private:
  struct Item {
    Position position;
    Work work;
  };

  void run();
  bool is_held(Position position) const;
  void wait_if_prompt(Position position);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  Position submitted_ = 0;
  Position demanded_ = 0;
  Position done_ = 0;
  bool has_thread_ = false;
  int number_ = -1;
  int numbering_ = 0;  // that the number belongs to
};

Stream& stream_of(cudaStream_t handle);
Stream& default_stream();
int current_device();
// Waits until all streams of the process have done what they have, also what they get while this waits.
void synchronize_all();

// The memory of torch's tensors, for work in a stream; see `Allocator` in memory.cpp.
void* allocate(size_t size, Stream& stream);
void free(void* begin);
void record_stream(void* begin, Stream& stream);
void poison_free_memory();

// Whether a pointer is into memory of the device, or into pinned memory of the host.
bool is_device_memory(const void* pointer);
bool is_pinned_memory(const void* pointer);

}  // namespace fake_device
