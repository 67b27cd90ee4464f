// Streams are threads, and events are positions in them.
#include "device.h"

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <thread>
#include <vector>

namespace fake_device {
namespace {

using Clock = std::chrono::steady_clock;

// After so long a late stream goes on although nobody waits for it, and a host stops to wait for a prompt one: else a
// program that polls an event would never end. What a program with the right waits computes does not depend on it.
constexpr auto kPatience = std::chrono::seconds(5);
constexpr int kMaxNumbered = 64;

std::atomic<bool> has_schedule{false};
std::atomic<uint64_t> late_streams{0};  // a bit for the number of each
// Streams have numbers in the order in which they get their first work, which is the same in every run of a program.
std::atomic<int> numbering{1};
std::atomic<int> num_numbered{0};
thread_local bool is_stream_thread = false;

std::mutex streams_mutex;
std::vector<Stream*>& all_streams() {
  static auto* streams = new std::vector<Stream*>;  // never freed: their threads may outlive static destructors
  return *streams;
}

bool is_late(int number) { return number >= 0 && number < kMaxNumbered && (late_streams >> number) & 1; }

Stream* new_stream(int device, int priority) {
  auto* stream = new Stream(device, priority);
  std::lock_guard<std::mutex> lock(streams_mutex);
  all_streams().push_back(stream);
  return stream;
}

std::vector<Stream*> streams_so_far() {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return all_streams();
}

}  // namespace

Stream::Stream(int device, int priority) : device(device), priority(priority) {}

Position Stream::enqueue(Work work, bool depends_on_peers) {
  Position position;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (numbering_ != numbering) {
      numbering_ = numbering;
      number_ = num_numbered++;
    }
    if (!has_thread_) {  // processes may fork until a stream has work
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    position = ++submitted_;
    items_.push_back({position, std::move(work)});
  }
  changed_.notify_all();
  if (!depends_on_peers && !is_stream_thread) wait_if_prompt(position);
  return position;
}

void Stream::wait_if_prompt(Position position) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (has_schedule && !is_late(number_)) changed_.wait_for(lock, kPatience, [&] { return done_ >= position; });
}

void Stream::wait_for(Position position) {
  std::unique_lock<std::mutex> lock(mutex_);
  demanded_ = std::max(demanded_, position);
  changed_.notify_all();
  changed_.wait(lock, [&] { return done_ >= position; });
}

bool Stream::has_passed(Position position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= position;
}

Position Stream::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  return submitted_;
}

bool Stream::is_held(Position position) const { return has_schedule && is_late(number_) && demanded_ < position; }

void Stream::run() {
  is_stream_thread = true;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !items_.empty(); });
    changed_.wait_for(lock, kPatience, [&] { return !is_held(items_.front().position); });
    Item item = std::move(items_.front());
    items_.pop_front();
    lock.unlock();
    item.work();
    item.work = nullptr;  // what it has kept is free before anybody hears that it is done
    lock.lock();
    done_ = item.position;
    changed_.notify_all();
  }
}

Stream& default_stream() {
  static std::map<int, Stream*> streams;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  auto& stream = streams[current_device()];
  if (stream == nullptr) stream = new_stream(current_device(), 0);
  return *stream;
}

Stream& stream_of(cudaStream_t handle) {
  bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? default_stream() : *reinterpret_cast<Stream*>(handle);
}

void synchronize_all() {
  for (bool is_busy = true; is_busy;) {
    is_busy = false;
    for (auto* stream : streams_so_far()) {
      is_busy |= !stream->has_passed(stream->end());
      stream->wait_for(stream->end());
    }
  }
}

namespace {

struct Event {
  Stream* stream = nullptr;  // null until it is recorded
  Position position = 0;
  bool has_time = true;
  std::shared_ptr<Clock::time_point> time;

  bool has_passed() const { return stream == nullptr || stream->has_passed(position); }
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

}  // namespace
}  // namespace fake_device

using namespace fake_device;

// Begins a run in which the streams whose bits are set are late, and all others prompt. Streams are numbered anew, from
// 0 on, as they get work.
DEVICE_API void fake_device_begin_run(uint64_t late) {
  synchronize_all();
  poison_free_memory();
  num_numbered = 0;
  ++numbering;
  late_streams = late;
  has_schedule = true;
}

DEVICE_API void fake_device_end_run() {
  synchronize_all();
  has_schedule = false;
}

// Returns how many streams have had work in the last run.
DEVICE_API int fake_device_num_streams() { return num_numbered; }

DEVICE_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  *handle = reinterpret_cast<cudaStream_t>(new_stream(current_device(), priority));
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
DEVICE_API cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
DEVICE_API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
DEVICE_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = stream_of(handle).priority;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  auto& stream = stream_of(handle);
  return stream.has_passed(stream.end()) ? cudaSuccess : cudaErrorNotReady;
}
DEVICE_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto& stream = stream_of(handle);
  stream.wait_for(stream.end());
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaDeviceSynchronize() {
  synchronize_all();
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  auto& stream = stream_of(handle);
  Event* event = event_of(event_handle);
  if (Stream* other = event->stream; other != nullptr && other != &stream)
    stream.enqueue([other, position = event->position] { other->wait_for(position); });
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  stream_of(handle).enqueue([=] { function(data); });
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaStreamAddCallback(
    cudaStream_t handle, cudaStreamCallback_t callback, void* data, unsigned) {
  stream_of(handle).enqueue([=] { callback(handle, cudaSuccess, data); });
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

DEVICE_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  auto* event = new Event;
  event->has_time = !(flags & cudaEventDisableTiming);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
DEVICE_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete event_of(handle);  // work that waits for it has its position
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  Event* event = event_of(handle);
  auto time = std::make_shared<Clock::time_point>();
  event->stream = &stream_of(stream_handle);
  event->time = time;
  event->position = event->stream->enqueue([time] { *time = Clock::now(); });
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  return cudaEventRecord(handle, stream_handle);
}
DEVICE_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return event_of(handle)->has_passed() ? cudaSuccess : cudaErrorNotReady;
}
DEVICE_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event* event = event_of(handle);
  if (event->stream != nullptr) event->stream->wait_for(event->position);
  return cudaSuccess;
}
DEVICE_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
  Event *begin = event_of(begin_handle), *end = event_of(end_handle);
  for (Event* event : {begin, end}) {
    if (event->stream == nullptr || !event->has_time) return cudaErrorInvalidResourceHandle;
    if (!event->has_passed()) return cudaErrorNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *begin->time).count();
  return cudaSuccess;
}
