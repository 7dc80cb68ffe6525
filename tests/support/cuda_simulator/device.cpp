// What Python cannot make by itself: tensors whose device is CUDA over memory of the simulator's, and the guard that
// torch asks for the current device before it makes a tensor there.

#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <utility>
#include <vector>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
thread_local c10::DeviceIndex current = 0;
c10::DeviceIndex devices = 1;

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(CUDA, std::exchange(current, device.index()));
  }
  c10::Device getDevice() const override {
    return c10::Device(CUDA, current);
  }
  void setDevice(c10::Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return devices;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

std::mutex mutex;
std::vector<int64_t> returned;

// A tensor of bytes over a block of memory; its number is in `take_returned` once nothing holds the memory any more.
at::Tensor over(int64_t address, int64_t size, int64_t number, int64_t device) {
  auto where = device < 0 ? c10::Device(c10::kCPU) : c10::Device(CUDA, static_cast<c10::DeviceIndex>(device));
  auto gone = [number](void*) {
    std::lock_guard<std::mutex> held(mutex);
    returned.push_back(number);
  };
  c10::DataPtr memory = c10::InefficientStdFunctionContext::makeDataPtr(reinterpret_cast<void*>(address), gone, where);
  c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(memory));
  auto keys = c10::DispatchKeySet(device < 0 ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, caffe2::TypeMeta::Make<uint8_t>());
  made.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return made;
}

// A tensor over the storage of `base`, wherever it lies.
at::Tensor part(
    const at::Tensor& base, at::ScalarType dtype, const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& strides, int64_t offset) {
  auto keys = c10::DispatchKeySet(base.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(base.storage()), keys, c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

// A tensor of the host over the same memory, which keeps nothing alive: what a kernel sees of its argument.
at::Tensor seen(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(
      reinterpret_cast<void*>(tensor.unsafeGetTensorImpl()->mutable_data()), tensor.sizes(), tensor.strides(), options);
}

std::vector<int64_t> take_returned() {
  std::lock_guard<std::mutex> held(mutex);
  return std::exchange(returned, {});
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("over", &over);
  module.def("part", &part);
  module.def("seen", &seen);
  module.def("take_returned", &take_returned);
  module.def("set_devices", [](int64_t number) { devices = static_cast<c10::DeviceIndex>(number); });
  module.def("current_device", []() { return static_cast<int64_t>(current); });
  module.def("set_device", [](int64_t device) { current = static_cast<c10::DeviceIndex>(device); });
}
