// NCCL between processes of one machine: what each collective does with the slots of a communicator.
#include "communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fake_device {
namespace {

Communicator& communicator_of(ncclComm_t handle) { return *reinterpret_cast<Communicator*>(handle); }
ncclComm_t handle_of(Communicator* communicator) { return reinterpret_cast<ncclComm_t>(communicator); }

// Numbers of 16 bits, summed in float and rounded at the end.
struct Bfloat16 {
  uint16_t bits;
  Bfloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = std::isnan(value) ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: fail("it has no such type");
  }
}

// How ranks' numbers become one; a sum may have a factor for every term.
struct Reduction {
  ncclRedOp_t operation;
  double factor = 1.0;
};

std::map<int, Reduction>& factored_sums() {
  static auto* sums = new std::map<int, Reduction>;
  return *sums;
}

Reduction reduction_of(ncclRedOp_t operation) {
  auto found = factored_sums().find(operation);
  return found == factored_sums().end() ? Reduction{operation} : found->second;
}

template <class Number, class Wide>
void reduce(char* to, const std::vector<const char*>& from, size_t offset, size_t count, Reduction reduction) {
  for (size_t i = 0; i < count; ++i) {
    Wide total{};
    for (size_t rank = 0; rank < from.size(); ++rank) {
      Number number = reinterpret_cast<const Number*>(from[rank])[offset + i];
      Wide term = reduction.factor == 1.0 ? Wide(number) : Wide(number * reduction.factor);
      if (rank == 0) {
        total = term;
      } else {
        switch (reduction.operation) {
          case ncclMax: total = std::max(total, term); break;
          case ncclMin: total = std::min(total, term); break;
          case ncclProd: total *= term; break;
          default: total += term;
        }
      }
    }
    if (reduction.operation == ncclAvg) total /= Wide(from.size());
    reinterpret_cast<Number*>(to)[i] = Number(total);
  }
}

// Reduces `count` numbers from the `offset`-th on.
void reduce(void* to, const std::vector<const char*>& from, size_t offset, size_t count, ncclDataType_t type,
            Reduction reduction) {
  auto* bytes = static_cast<char*>(to);
  switch (type) {
    case ncclInt8: return reduce<int8_t, int8_t>(bytes, from, offset, count, reduction);
    case ncclUint8: return reduce<uint8_t, uint8_t>(bytes, from, offset, count, reduction);
    case ncclInt32: return reduce<int32_t, int32_t>(bytes, from, offset, count, reduction);
    case ncclInt64: return reduce<int64_t, int64_t>(bytes, from, offset, count, reduction);
    case ncclFloat16: return reduce<_Float16, float>(bytes, from, offset, count, reduction);
    case ncclBfloat16: return reduce<Bfloat16, float>(bytes, from, offset, count, reduction);
    case ncclFloat32: return reduce<float, float>(bytes, from, offset, count, reduction);
    case ncclFloat64: return reduce<double, double>(bytes, from, offset, count, reduction);
    default: fail("it has no sums of this type");
  }
}

// A message that a rank sends to one other rank, or receives. A slot has the number of those that are sent, and of each
// its receiver, its size and its bytes.
struct Letter {
  bool is_sent;
  void* memory;
  size_t num_bytes;
  int peer;
  Communicator* communicator;
  Stream* stream;
};

struct Envelope {
  int64_t receiver;
  size_t num_bytes;
};

thread_local int group_depth = 0;
thread_local std::vector<Letter> group_letters;

void write_letters(char* slot, const std::vector<Letter>& letters) {
  int64_t num_sent = 0;
  char* end = slot + sizeof num_sent;
  for (const auto& letter : letters) {
    if (!letter.is_sent) continue;
    Envelope envelope{letter.peer, letter.num_bytes};
    std::memcpy(end, &envelope, sizeof envelope);
    std::memcpy(end + sizeof envelope, letter.memory, letter.num_bytes);
    end += sizeof envelope + letter.num_bytes;
    ++num_sent;
  }
  std::memcpy(slot, &num_sent, sizeof num_sent);
}

// Takes the letter to `receiver` that comes behind `num_taken` others.
void read_letter(const char* slot, int receiver, int num_taken, const Letter& letter) {
  int64_t num_sent;
  std::memcpy(&num_sent, slot, sizeof num_sent);
  const char* next = slot + sizeof num_sent;
  for (int64_t i = 0; i < num_sent; ++i) {
    Envelope envelope;
    std::memcpy(&envelope, next, sizeof envelope);
    next += sizeof envelope;
    if (envelope.receiver == receiver && num_taken-- == 0) {
      if (envelope.num_bytes != letter.num_bytes) fail("a message has another size than its receiver expects");
      std::memcpy(letter.memory, next, letter.num_bytes);
      return;
    }
    next += envelope.num_bytes;
  }
  fail("a message was not sent");
}

// Exchanges the letters of a group, in which all ranks of the communicator must take part.
void send_letters() {
  if (group_letters.empty()) return;
  auto letters = std::make_shared<std::vector<Letter>>(std::move(group_letters));
  group_letters.clear();
  Communicator* communicator = letters->front().communicator;
  size_t num_bytes = sizeof(int64_t);
  for (const auto& letter : *letters) num_bytes += sizeof(Envelope) + letter.num_bytes;
  communicator->enqueue(
      *letters->front().stream, num_bytes, [=](char* slot) { write_letters(slot, *letters); },
      [=](const std::vector<const char*>& slots) {
        std::map<int, int> num_taken;
        for (const auto& letter : *letters)
          if (!letter.is_sent)
            read_letter(slots[letter.peer], communicator->rank, num_taken[letter.peer]++, letter);
      });
}

void post(Letter letter) {
  group_letters.push_back(letter);
  if (group_depth == 0) send_letters();
}

Communicator::Fill copy_of(const void* from, size_t num_bytes) {
  return [=](char* slot) { std::memcpy(slot, from, num_bytes); };
}

}  // namespace
}  // namespace fake_device

using namespace fake_device;

DEVICE_API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
DEVICE_API const char* ncclGetErrorString(ncclResult_t) { return "an error of the fake NCCL"; }
DEVICE_API const char* ncclGetLastError(ncclComm_t) { return ""; }

DEVICE_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> num_ids{0};
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "%d_%d", getpid(), num_ids++);
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  *handle = handle_of(new Communicator(id.internal, size, rank));
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(handle, size, id, rank, nullptr);
}
DEVICE_API ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* part, ncclConfig_t*) {
  *part = handle_of(communicator_of(handle).split(color, key));
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
DEVICE_API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
DEVICE_API ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
DEVICE_API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) { return *result = ncclSuccess; }
DEVICE_API ncclResult_t ncclCommCount(ncclComm_t handle, int* count) {
  *count = communicator_of(handle).size;
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  *rank = communicator_of(handle).rank;
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* operation, void* factor, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t) {
  if (type != ncclFloat32 && type != ncclFloat64) return ncclInvalidUsage;
  static std::atomic<int> next{ncclNumOps};
  *operation = static_cast<ncclRedOp_t>(next++);
  double value = type == ncclFloat32 ? *static_cast<float*>(factor) : *static_cast<double*>(factor);
  factored_sums()[*operation] = {ncclSum, value};
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

DEVICE_API ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclGroupEnd() {
  if (--group_depth == 0) send_letters();
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclSend(
    const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t stream) {
  auto* memory = const_cast<void*>(from);
  post({true, memory, count * size_of(type), peer, &communicator_of(handle), &stream_of(stream)});
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclRecv(
    void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t stream) {
  post({false, to, count * size_of(type), peer, &communicator_of(handle), &stream_of(stream)});
  return ncclSuccess;
}

DEVICE_API ncclResult_t ncclAllReduce(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t handle,
    cudaStream_t stream) {
  size_t num_bytes = count * size_of(type);
  Reduction reduction = reduction_of(operation);
  auto read = [=](const std::vector<const char*>& slots) { reduce(to, slots, 0, count, type, reduction); };
  communicator_of(handle).enqueue(stream_of(stream), num_bytes, copy_of(from, num_bytes), read);
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclReduceScatter(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t handle,
    cudaStream_t stream) {
  auto& communicator = communicator_of(handle);
  size_t num_bytes = communicator.size * count * size_of(type), offset = communicator.rank * count;
  Reduction reduction = reduction_of(operation);
  auto read = [=](const std::vector<const char*>& slots) { reduce(to, slots, offset, count, type, reduction); };
  communicator.enqueue(stream_of(stream), num_bytes, copy_of(from, num_bytes), read);
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclBroadcast(
    const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t handle, cudaStream_t stream) {
  auto& communicator = communicator_of(handle);
  size_t num_bytes = count * size_of(type);
  Communicator::Fill fill = [](char*) {};
  if (communicator.rank == root) fill = copy_of(from, num_bytes);
  auto read = [=](const std::vector<const char*>& slots) { std::memcpy(to, slots[root], num_bytes); };
  communicator.enqueue(stream_of(stream), num_bytes, fill, read);
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclAllGather(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle, cudaStream_t stream) {
  size_t num_bytes = count * size_of(type);
  auto read = [=](const std::vector<const char*>& slots) {
    for (size_t rank = 0; rank < slots.size(); ++rank)
      std::memcpy(static_cast<char*>(to) + rank * num_bytes, slots[rank], num_bytes);
  };
  communicator_of(handle).enqueue(stream_of(stream), num_bytes, copy_of(from, num_bytes), read);
  return ncclSuccess;
}
DEVICE_API ncclResult_t ncclAlltoAll(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle, cudaStream_t stream) {
  auto& communicator = communicator_of(handle);
  size_t num_bytes = count * size_of(type), offset = communicator.rank * num_bytes;
  auto read = [=](const std::vector<const char*>& slots) {
    for (size_t rank = 0; rank < slots.size(); ++rank)
      std::memcpy(static_cast<char*>(to) + rank * num_bytes, slots[rank] + offset, num_bytes);
  };
  size_t all_bytes = communicator.size * num_bytes;
  communicator.enqueue(stream_of(stream), all_bytes, copy_of(from, all_bytes), read);
  return ncclSuccess;
}
