// What PyTorch asks a CUDA runtime: devices, streams, generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace pretended {

// One stream per GPU: kernels run at once, so whatever waits has nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = checked(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(Device device) const noexcept override {
    const int index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::DEFAULT, Device(DeviceType::CUDA, index));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(devices); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { ++waits; }
  void synchronizeEvent(void*) const override { ++waits; }
  void synchronizeDevice(const c10::DeviceIndex) const override { ++waits; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};

// A generator of a GPU holds one of the CPU, which the CPU's kernels are given.
struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  explicit Generator(int device)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, device),
                           c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    auto& held = const_cast<c10::TensorImpl&>(state);
    host.set_state(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&held)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return const_cast<at::Generator&>(host).get_state().getIntrusivePtr();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = const_cast<at::Generator&>(host).clone();
    return copy;
  }
};

inline const at::Generator& default_generator(int device) {
  static std::map<int, at::Generator> all;
  static std::mutex lock;
  std::lock_guard<std::mutex> guard(lock);
  if (device < 0) device = current;
  if (!all.count(device)) all[device] = at::make_generator<Generator>(device);
  return all[device];
}

}  // namespace pretended

// PyTorch looks for hooks of exactly this name when it first needs CUDA.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return pretended::devices > 0; }
  bool hasCUDA() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return pretended::default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<pretended::Generator>(device < 0 ? 0 : device);
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(c10::DeviceType::CUDA, pretended::current);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(pretended::devices); }
  c10::DeviceIndex getCurrentDevice() const override {
    return c10::DeviceIndex(pretended::current);
  }
  int getNumGPUs() const override { return pretended::devices; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
