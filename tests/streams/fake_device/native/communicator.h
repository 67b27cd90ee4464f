// The ranks of one machine meet in a file that all of them map, on the threads of their streams.
#pragma once

#include "device.h"

#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace fake_device {

constexpr size_t kHeaderBytes = 4096;
constexpr size_t kSlotBytes = size_t{64} << 20;  // of the file: a page that nobody has written to takes no memory
constexpr int kPollMicroseconds = 20;

[[noreturn]] inline void fail(const char* reason) {
  std::fprintf(stderr, "fake NCCL: %s\n", reason);
  std::abort();
}

// The ranks of a communicator, with a slot of shared memory for the message of each.
//
// In the first half of a collective a rank fills its slot, in the second half it waits for all and reads their slots.
// Two sets of slots take turns: who fills a slot again has met all ranks in between, so all have read it.
class Communicator {
 public:
  using Fill = std::function<void(char* slot)>;
  using Read = std::function<void(const std::vector<const char*>& slots)>;

  Communicator(const std::string& name, int size, int rank) : name(name), size(size), rank(rank) {
    const char* folder = std::getenv("FAKE_DEVICE_FOLDER");
    if (folder == nullptr) fail("FAKE_DEVICE_FOLDER is not set");
    int file = open((std::string(folder) + "/" + name).c_str(), O_RDWR | O_CREAT, 0600);
    size_t num_bytes = kHeaderBytes + 2 * size * kSlotBytes;
    if (file < 0 || ftruncate(file, num_bytes) != 0) fail("the file of a communicator cannot be made");
    void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (memory == MAP_FAILED) fail("the file of a communicator cannot be mapped");
    close(file);
    memory_ = static_cast<char*>(memory);
  }

  // Enqueues a collective. As in NCCL those of one communicator run in order, also on different streams.
  void enqueue(Stream& stream, size_t num_bytes, Fill fill, Read read) {
    if (num_bytes > kSlotBytes) fail("a message is too large");
    std::lock_guard<std::mutex> lock(mutex_);
    if (last_stream_ != nullptr && last_stream_ != &stream)
      stream.enqueue([last = last_stream_, position = last_position_] { last->wait_for(position); });
    uint64_t number = num_enqueued_++;
    stream.enqueue([=, this] { fill(slot(number, rank)); });
    auto meet_and_read = [=, this] {
      meet(kArrivals, number);
      std::vector<const char*> slots;
      for (int other = 0; other < size; ++other) slots.push_back(slot(number, other));
      read(slots);
    };
    last_position_ = stream.enqueue(meet_and_read, /*depends_on_peers=*/true);
    last_stream_ = &stream;
  }

  // Returns a communicator of the ranks that have named the same color, in the order of their keys; null without one.
  Communicator* split(int color, int key) {
    uint64_t number = num_splits_++;
    Vote* votes = reinterpret_cast<Vote*>(memory_ + kVotesAt) + (number % 2) * size;
    votes[rank] = {color, key};
    meet(kVoters, number);
    if (color == NCCL_SPLIT_NOCOLOR) return nullptr;
    int new_size = 0, new_rank = 0;
    for (int other = 0; other < size; ++other) {
      if (votes[other].color != color) continue;
      ++new_size;
      new_rank += votes[other].key < key || (votes[other].key == key && other < rank);
    }
    auto new_name = name + "_" + std::to_string(number) + "_" + std::to_string(color);
    return new Communicator(new_name, new_size, new_rank);
  }

  const std::string name;
  const int size;
  const int rank;

 private:
  struct Vote {
    int color;
    int key;
  };
  // Where in the header what is.
  static constexpr size_t kArrivals = 0, kVoters = 64, kVotesAt = 128;

  char* slot(uint64_t number, int of_rank) const {
    return memory_ + kHeaderBytes + ((number % 2) * size + of_rank) * kSlotBytes;
  }

  // Returns when all ranks have come to the collective of this number, or to the split.
  void meet(size_t counter_at, uint64_t number) const {
    auto& arrivals = *reinterpret_cast<std::atomic<uint64_t>*>(memory_ + counter_at);
    ++arrivals;
    while (arrivals < (number + 1) * size) usleep(kPollMicroseconds);
  }

  std::mutex mutex_;
  char* memory_;
  uint64_t num_enqueued_ = 0;
  uint64_t num_splits_ = 0;
  Stream* last_stream_ = nullptr;
  Position last_position_ = 0;
};

}  // namespace fake_device
