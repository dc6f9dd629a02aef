// A CUDA device that the CPU plays: memory of the host, and the CPU's kernels.
//
// An operation on CUDA tensors is given CPU tensors of the same memory. Tensors of two devices are
// refused as on a GPU. What is not written here, such as cuDNN, is not there.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace at {

const Device CUDA_0(DeviceType::CUDA, 0);

// Memory, which is counted.

std::atomic<int64_t> held{0}, most{0};

struct Block {
  void* memory;
  size_t size;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  held -= block->size;
  free(block->memory);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = std::max<size_t>((bytes + 511) / 512, 1) * 512;
    void* memory = std::aligned_alloc(512, size);
    TORCH_CHECK(memory, "out of memory");
    std::memset(memory, 0xA5, size);  // what was there before is not to be read
    const int64_t now = held += size;
    for (int64_t old = most; now > old && !most.compare_exchange_weak(old, now);) {
    }
    return {memory, new Block{memory, size}, &free_block, CUDA_0};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

DeviceAllocator allocator;

// One stream, and what torch asks of the device.

Stream the_stream() { return Stream(Stream::DEFAULT, CUDA_0); }

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return CUDA_0; }
  Device exchangeDevice(Device) const override { return CUDA_0; }
  Stream getStream(Device) const noexcept override { return the_stream(); }
  Stream getDefaultStream(Device) const override { return the_stream(); }
  Stream getNewStream(Device, int) const override { return the_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return the_stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return getCPUAllocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(DeviceIndex) const override {}
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return detail::getDefaultCPUGenerator();
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

// Tensors of the same memory.

Tensor view_of(const Tensor& tensor, IntArrayRef size, IntArrayRef stride,
               std::optional<int64_t> offset, caffe2::TypeMeta dtype) {
  auto view = detail::make_tensor<TensorImpl>(
      TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride, offset.value_or(tensor.storage_offset()));
  return view;
}

Tensor same_memory_on(const Tensor& tensor, DeviceType type) {
  const Device device = type == DeviceType::CUDA ? CUDA_0 : Device(type);
  auto release = [](void* owner) { delete static_cast<Tensor*>(owner); };
  c10::DataPtr memory(const_cast<void*>(tensor.storage().data()), new Tensor(tensor), release, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(memory),
                       c10::GetAllocator(DeviceType::CPU), /*resizable=*/true);
  const auto key = type == DeviceType::CUDA ? DispatchKey::CUDA : DispatchKey::CPU;
  auto other = detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), tensor.dtype());
  auto* impl = other.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  return other;
}

Tensor on_cpu(const Tensor& tensor) {
  const bool ours = tensor.defined() && tensor.is_cuda();
  return ours ? same_memory_on(tensor, DeviceType::CPU) : tensor;
}

// What makes tensors, looks at them in another way, or reads and writes across devices.

Tensor empty_memory_format(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                           std::optional<Device>, std::optional<bool>,
                           std::optional<MemoryFormat> format) {
  return detail::empty_generic(
      size, &allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

Tensor empty_strides(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                     std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return detail::empty_strided_generic(
      size, stride, &allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

// A result in memory of the device, so that it is counted.
Tensor copy_on_device(const Tensor& result) {
  auto copy = empty_strides(result.sizes(), result.strides(), result.scalar_type(), {}, {}, {});
  on_cpu(copy).copy_(result);
  return copy;
}

Tensor strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return view_of(self, size, stride, offset, self.dtype());
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return strided(self, size, stride, self.storage_offset());
}

Tensor viewed(const Tensor& self, IntArrayRef size) {
  const auto inferred = infer_size(size, self.numel());
  const auto stride = detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return strided(self, inferred, *stride, self.storage_offset());
}

Tensor unfolded(const Tensor& self, int64_t axis, int64_t length, int64_t step) {
  auto size = self.sizes().vec(), stride = self.strides().vec();
  axis = maybe_wrap_dim(axis, self.dim());
  size[axis] = (size[axis] - length) / step + 1;
  size.push_back(length);
  stride.push_back(stride[axis]);
  stride[axis] *= step;
  return strided(self, size, stride, self.storage_offset());
}

Tensor& set_storage(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& copy_into(Tensor& self, const Tensor& source, bool) {
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

Scalar item(const Tensor& self) { return on_cpu(self).item(); }

// Kernels that only a GPU has, by those of the CPU.

Tensor product_in(const Tensor& a, const Tensor& b, ScalarType dtype) {
  return a.dim() == 3 ? bmm(a.to(dtype), b.to(dtype)) : mm(a.to(dtype), b.to(dtype));
}

using FlashResults =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

FlashResults flash_attention(const Tensor& q, const Tensor& k, const Tensor& v, double dropout,
                             bool causal, bool, std::optional<double> scale) {
  auto [out, normaliser] = _scaled_dot_product_flash_attention_for_cpu(
      on_cpu(q), on_cpu(k), on_cpu(v), dropout, causal, {}, scale);
  const auto state = empty_memory_format({0}, kLong, {}, {}, {}, {});
  return {copy_on_device(out), copy_on_device(normaliser), {}, {}, q.size(2), k.size(2), state, state, {}};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_gradients(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& normaliser, const Tensor&, const Tensor&, int64_t, int64_t, double dropout,
    bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  auto [dq, dk, dv] = _scaled_dot_product_flash_attention_for_cpu_backward(
      on_cpu(grad), on_cpu(q), on_cpu(k), on_cpu(v), on_cpu(out), on_cpu(normaliser), dropout, causal,
      {}, scale);
  return {copy_on_device(dq), copy_on_device(dk), copy_on_device(dv)};
}

// All else.

// Tensors of a call, and the CPU's of the same memory.
struct Arguments {
  std::vector<Tensor> cuda, cpu;

  Tensor operator()(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    cuda.push_back(tensor);
    cpu.push_back(on_cpu(tensor));
    return cpu.back();
  }

  // An out= of another size was given other memory, in which it goes on.
  void follow() const {
    for (size_t i = 0; i < cpu.size(); ++i) {
      auto* impl = cuda[i].unsafeGetTensorImpl();
      if (cpu[i].storage().data() != cuda[i].storage().data()) {
        impl->set_storage_keep_dtype(same_memory_on(cpu[i], DeviceType::CUDA).storage());
      }
      impl->set_sizes_and_strides(cpu[i].sizes(), cpu[i].strides(), cpu[i].storage_offset());
    }
  }

  Tensor back(const Tensor& result) const {
    if (!result.defined() || !result.is_cpu()) return result;
    for (size_t i = 0; i < cpu.size(); ++i) {
      if (cpu[i].is_same(result)) return cuda[i];
      if (result.storage().nbytes() && result.storage().data() == cpu[i].storage().data()) {
        return view_of(cuda[i], result.sizes(), result.strides(), result.storage_offset(), result.dtype());
      }
    }
    return copy_on_device(result);
  }
};

template <class Function>
void replace_tensors(IValue& value, Function&& function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
    value = tensors;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : tensor);
    }
    value = tensors;
  }
}

void by_the_cpu(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  bool of_host = false;
  Arguments arguments;
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    const bool indices = value.isOptionalTensorList();  // may lie on the host
    replace_tensors(value, [&](const Tensor& tensor) {
      of_host |= tensor.defined() && tensor.is_cpu() && tensor.dim() && !indices;
      return arguments(tensor);
    });
    if (value.isDevice() && value.toDevice().is_cuda()) value = Device(DeviceType::CPU);
  }
  TORCH_CHECK(!of_host || arguments.cuda.empty(), schema.name(),
              " got tensors on two devices, cuda:0 and cpu");
  op.callBoxed(stack);
  arguments.follow();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    replace_tensors((*stack)[i], [&](const Tensor& tensor) { return arguments.back(tensor); });
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strides);
  library.impl("as_strided", strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", viewed);
  library.impl("unfold", unfolded);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("copy_", copy_into);
  library.impl("_local_scalar_dense", item);
  library.impl("mm.dtype", product_in);
  library.impl("bmm.dtype", product_in);
  library.impl("_scaled_dot_product_flash_attention", flash_attention);
  library.impl("_scaled_dot_product_flash_attention_backward", flash_attention_gradients);
  for (const char* name : {"convolution", "convolution_backward"}) {  // they choose by the device
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

const bool registered = [] {
  c10::SetAllocator(DeviceType::CUDA, &allocator, 100);
  return true;
}();

}  // namespace at

namespace c10::impl {
using at::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace c10::impl

extern "C" {
int64_t memory_allocated() { return at::held; }
int64_t max_memory_allocated() { return at::most; }
void reset_peak_memory_stats() { at::most = at::held.load(); }
}
