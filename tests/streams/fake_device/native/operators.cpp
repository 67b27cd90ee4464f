// Operators on the fake device, computed by torch's CPU operators on the threads of streams.
//
// The memory of the device is memory of the host, so a CPU tensor over the same memory stands in for a CUDA tensor. As
// on a device the host only finds out what the results look like, by torch's operators on meta tensors, and goes on.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// What keeps its kernels: they compute nothing, or use the runtime only.
const std::set<std::string> kKept = {
    "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_local_scalar_dense", "aten::_pin_memory",
    "aten::_reshape_alias", "aten::as_strided", "aten::empty", "aten::empty_strided", "aten::is_pinned",
    "aten::is_set_to", "aten::record_stream", "aten::resize_", "aten::set_", "aten::unfold", "aten::view",
    "aten::view_as_complex", "aten::view_as_real"};

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Copies a value with each of its tensors replaced.
template <class Replace>
IValue replaced(const IValue& value, const Replace& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(replace(each));
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<Tensor>> list;
    for (const IValue& each : value.toList().vec())
      list.push_back(each.isNone() ? std::nullopt : std::optional<Tensor>(replace(each.toTensor())));
    return list;
  }
  return value;
}

// Returns a generator of the CPU in the state that one of the device is in, and advances that one.
at::Generator as_cpu_generator(at::Generator generator) {
  constexpr uint64_t kStep = 4, kOddFactor = 0x9E3779B97F4A7C15;  // the CPU's generator looks at 32 bits of its seed
  uint64_t mixed = (generator.current_seed() + generator.get_offset() / kStep + 1) * kOddFactor;
  generator.set_offset(generator.get_offset() + kStep);
  return at::make_generator<at::CPUGeneratorImpl>(mixed >> 32);
}

Tensor with_number_flag(Tensor tensor, const Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Tensor as_meta(const Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Returns the CPU tensor over the memory of a CUDA tensor. Other tensors are copied, as the host may write to them
// before the device reads them.
Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_cuda()) return with_number_flag(tensor.clone(), tensor);
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto cpu = tensor.numel() == 0 ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                                 : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  return with_number_flag(cpu, tensor);
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard besides(
      c10::autocast_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::Python) |
      c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot));
  op.callBoxed(&stack);
}

// A call of an operator with CUDA tensors.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<IValue> arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)), device_(device()) {}

  Stack run() {
    c10::DeviceGuard guard(device_);  // a tensor of another device than the current one
    auto& stream = fake_device::stream_of(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
    Stack results;
    bool is_known = resize_outputs() && allocate(results);
    Stack cpu = on_cpu();
    if (is_known) {
      stream.enqueue([op = op_, cpu = std::make_shared<Stack>(std::move(cpu)), outputs = outputs_on_cpu(results)] {
        compute(op, *cpu, outputs);
      });
      return results;
    }
    stream.wait_for(stream.end());  // what the results look like depends on values: the host must wait
    call(op_, cpu);
    return from_cpu(cpu);
  }

 private:
  // The CPU's operator leaves out what nobody has asked for, such as a gradient, or statistics in evaluation.
  static void copy_result(const Tensor& to, const Tensor& from) {
    if (to.defined() && from.defined() && from.numel() == to.numel()) to.copy_(from);
  }

  static void compute(
      const c10::OperatorHandle& op, Stack stack, const std::vector<std::pair<size_t, IValue>>& outputs) {
    at::NoGradGuard no_grad;
    try {
      call(op, stack);
      for (const auto& [place, output] : outputs) {
        if (output.isTensor()) {
          copy_result(output.toTensor(), stack[place].toTensor());
        } else {
          auto to = output.toTensorVector(), from = stack[place].toTensorVector();
          for (size_t i = 0; i < to.size(); ++i) copy_result(to[i], from[i]);
        }
      }
    } catch (const std::exception& error) {  // a device would fail as late as this, too
      std::fprintf(stderr, "fake device: %s failed: %s\n", op.schema().name().c_str(), error.what());
      std::abort();
    }
  }

  at::Device device() const {
    for (const IValue& value : arguments_) {
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda())
        return value.toTensor().device();
      if (value.isTensorList())
        for (const Tensor& each : value.toTensorVector())
          if (each.is_cuda()) return each.device();
      if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) return value.toDevice();
    }
    return {at::kCUDA, c10::cuda::current_device()};
  }

  // Gives empty tensors that the operator writes to the size that they will have; returns whether that is possible.
  bool resize_outputs() const {
    std::vector<size_t> empty;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!is_written(schema_.arguments()[i]) || !arguments_[i].isTensor()) continue;
      if (!arguments_[i].toTensor().is_cuda()) return false;
      if (arguments_[i].toTensor().numel() == 0) empty.push_back(i);
    }
    if (empty.empty()) return true;
    Stack metas = on_meta(), called = metas;
    try {
      call(op_, called);
    } catch (const std::exception&) {  // it has no meta kernel
      return false;
    }
    for (size_t i : empty) arguments_[i].toTensor().resize_(metas[i].toTensor().sizes());
    return true;
  }

  Stack on_meta() const {
    Stack metas;
    for (const IValue& value : arguments_) {
      if (value.isDevice()) metas.emplace_back(at::Device(at::kMeta));
      else if (value.isGenerator()) metas.emplace_back();
      else metas.push_back(replaced(value, as_meta));
    }
    return metas;
  }

  Stack on_cpu() const {
    Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const IValue& value = arguments_[i];
      if (value.isDevice() && value.toDevice().is_cuda()) {
        stack.emplace_back(at::Device(at::kCPU));
      } else if (schema_.arguments()[i].type()->str().find("Generator") != std::string::npos) {
        bool is_given = value.isGenerator() && value.toGenerator().defined();
        auto generator = is_given ? value.toGenerator() : at::globalContext().defaultGenerator(device_);
        stack.emplace_back(as_cpu_generator(generator));
      } else {
        bool is_output = is_written(schema_.arguments()[i]);
        stack.push_back(replaced(value, [&](const Tensor& each) {
          return is_output && each.defined() && !each.is_cuda() ? each : as_cpu(each);
        }));
      }
    }
    return stack;
  }

  // Returns the argument that a result of the operator is, or null if it is a new one.
  const IValue* argument_returned(const c10::Argument& result) const {
    if (!is_written(result)) return nullptr;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      if (is_written(argument) && argument.alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return &arguments_[i];
    }
    return nullptr;
  }

  bool returns_arguments_only() const {
    for (const auto& result : schema_.returns())
      if (argument_returned(result) == nullptr) return false;
    return true;
  }

  // Makes the results without their values; returns whether that is possible.
  bool allocate(Stack& results) const {
    Stack metas(schema_.returns().size());
    if (!returns_arguments_only()) {
      metas = on_meta();
      try {
        call(op_, metas);
        } catch (const std::exception&) {  // it has no meta kernel
        return false;
      }
    }
    for (size_t i = 0; i < metas.size(); ++i) {
      const IValue* argument = argument_returned(schema_.returns()[i]);
      if (argument == nullptr && !metas[i].isTensor() && !metas[i].isTensorList()) return false;
      results.push_back(argument != nullptr ? *argument : replaced(metas[i], [&](const Tensor& meta) {
        if (!meta.defined()) return meta;
        return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device_));
      }));
    }
    return true;
  }

  // Returns CPU tensors over the new ones among the results, with their places.
  std::vector<std::pair<size_t, IValue>> outputs_on_cpu(const Stack& results) const {
    c10::InferenceMode is_no_inference(false);  // the stream's thread, which writes to them, is in no such mode
    std::vector<std::pair<size_t, IValue>> outputs;
    for (size_t i = 0; i < results.size(); ++i)
      if (argument_returned(schema_.returns()[i]) == nullptr) outputs.emplace_back(i, replaced(results[i], as_cpu));
    return outputs;
  }

  // Returns what the host has computed as results on the device.
  Stack from_cpu(const Stack& computed) const {
    Stack results;
    for (size_t i = 0; i < computed.size(); ++i) {
      const IValue* argument = argument_returned(schema_.returns()[i]);
      if (argument != nullptr && argument->isTensor() && argument->toTensor().is_cuda()) {
        const Tensor &to = argument->toTensor(), from = computed[i].toTensor();
        if (to.numel() == 0 && from.numel() != 0) to.resize_(from.sizes()).copy_(from);
      }
      results.push_back(argument != nullptr ? *argument : replaced(computed[i], [&](const Tensor& cpu) {
        return cpu.defined() ? cpu.to(device_) : cpu;
      }));
    }
    return results;
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  std::vector<IValue> arguments_;
  at::Device device_;
};

// Makes arguments such as the CPU's operator takes them; returns the type of the result, if it is to be converted.
//
// Softmax of autocast is in float32 whatever it gets, and its gradient again in that type; the CPU converts neither.
// Statistics of a normalization are in float32 on CUDA, on the CPU only if its weight is.
std::optional<at::ScalarType> adapt(const std::string& name, std::vector<IValue>& arguments) {
  if (name == "aten::_softmax" || name == "aten::_log_softmax") {
    if (arguments[2].toBool()) arguments[0] = arguments[0].toTensor().to(at::kFloat);
    arguments[2] = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    auto asked = arguments[3].toScalarType(), computed = arguments[0].toTensor().scalar_type();
    arguments[3] = computed;
    if (asked != computed) return asked;
  } else if (name == "aten::native_layer_norm_backward") {
    auto like = arguments[5].isTensor() && arguments[5].toTensor().defined() ? arguments[5] : arguments[1];
    for (size_t i : {3, 4}) arguments[i] = arguments[i].toTensor().to(like.toTensor().scalar_type());
  }
  return std::nullopt;
}

void run_on_device(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const std::string& name = op.schema().name();
  bool is_functional = op.schema().overload_name().empty();
  std::vector<IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  if (name == "aten::copy_") {
    Tensor to = arguments[0].toTensor(), from = arguments[1].toTensor();
    if (!to.is_cuda() || !from.is_cuda()) {  // the runtime copies
      stack->emplace_back(at::native::copy_(to, from, arguments[2].toBool()));
      return;
    }
  }
  auto type = is_functional ? adapt(name, arguments) : std::nullopt;
  for (IValue& result : Call(op, std::move(arguments)).run())
    stack->push_back(type ? IValue(result.toTensor().to(*type)) : std::move(result));
}

bool is_replaced(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name.rfind("aten::", 0) != 0 || kKept.count(name)) return false;
  for (const auto& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return false;  // a view
  return name == "aten::copy_" || op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

class Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

// Gives all operators of torch that have a kernel for CUDA one for the fake device. Returns how many those are.
DEVICE_API int fake_device_replace_operators() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  Silence silence;  // torch warns of each kernel that is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  int count = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || !is_replaced(*op)) continue;
    auto suffix = name.overload_name.empty() ? "" : "." + name.overload_name;
    library->impl((name.name + suffix).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
    ++count;
  }
  return count;
}
