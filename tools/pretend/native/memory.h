// Memory of the pretended GPUs: host memory for the values, and a book kept in Python for the bytes.
//
// Each block is entered in the book, which is tight_fit/memory/allocator.py: it decides what is
// allocated, what is reserved, and when the GPU is full. The book is called by ctypes, which takes
// Python's lock, so no lock may be held here while it is called. A block that is freed is only
// noted, and the book asks for such notes: memory is also freed while Python handles an exception.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace pretended {

using c10::Device;
using c10::DeviceType;

using Enter = int64_t (*)(int device, int64_t bytes);  // an address, or -1 where the GPU is full
inline Enter enter = nullptr;
inline std::mutex freed_lock;
inline std::vector<std::pair<int, int64_t>> freed;  // blocks that the book does not know of yet
inline int64_t capacity = 0;   // bytes, as the driver tells them
inline int64_t workspace = 0;  // bytes of one cuBLAS handle
inline int devices = 1;
inline thread_local int current = 0;
inline bool used = false, forked = false;  // a process that has used CUDA; a copy of such a one
inline std::atomic<int64_t> waits{0};  // how often the host has waited for a GPU

inline int64_t take(int device, int64_t bytes) {
  if (enter == nullptr || bytes == 0) return 0;
  static const int asked = pthread_atfork(nullptr, nullptr, [] { forked = used; });
  TORCH_CHECK(asked == 0 && !forked, "Cannot re-initialize CUDA in forked subprocess. To use CUDA ",
              "with multiprocessing, you must use the 'spawn' start method");
  used = true;
  const int64_t address = enter(device, bytes);
  TORCH_CHECK_WITH(
      OutOfMemoryError, address >= 0, "CUDA out of memory. Tried to allocate ",
      (bytes + (1 << 20) - 1) >> 20, ".00 MiB. GPU ", device, " has a total capacity of ",
      capacity >> 20, ".00 MiB (a pretended GPU).");
  return address;
}

inline void give(int device, int64_t address) {
  if (enter == nullptr || address <= 0) return;
  std::lock_guard<std::mutex> guard(freed_lock);
  freed.emplace_back(device, address);
}

// What a block of a GPU's memory is: host memory of its own, or the storage of a result that a
// kernel of the CPU has made.
struct Block {
  int device;
  int64_t address;
  void* own;
  size_t bytes;
  c10::Storage result;
};

// A GPU may have more memory than the host: of large blocks the host only lends what is written.
constexpr size_t LARGE = 64 << 20;

inline void* borrow(size_t bytes) {
  void* found = nullptr;
  if (bytes < LARGE) return posix_memalign(&found, 512, bytes) == 0 ? found : nullptr;
  const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

inline void drop(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->own != nullptr && block->bytes >= LARGE)
    munmap(block->own, block->bytes);
  else
    std::free(block->own);
  give(block->device, block->address);
  delete block;
}

inline int checked(Device device) {
  const int index = device.has_index() ? device.index() : current;
  TORCH_CHECK(index < devices, "CUDA error: invalid device ordinal");
  return index;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr on(int device, size_t bytes) {
    const Device place(DeviceType::CUDA, device);
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, place};
    const int64_t address = take(device, int64_t(bytes));
    void* own = borrow(bytes);
    if (own == nullptr) {
      give(device, address);
      TORCH_CHECK(false, "The host's memory is full.");
    }
    return {own, new Block{device, address, own, bytes, c10::Storage()}, &drop, place};
  }
  c10::DataPtr allocate(size_t bytes) override { return on(current, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};
inline Allocator allocator;

// A matrix product takes a workspace on each thread and GPU that makes one: once, and for good.
inline std::mutex workspaces_lock;
inline std::map<std::pair<std::thread::id, int>, int64_t> workspaces;

inline void want_workspace(int device) {
  const auto key = std::make_pair(std::this_thread::get_id(), device);
  {
    std::lock_guard<std::mutex> guard(workspaces_lock);
    if (workspace == 0 || workspaces.count(key)) return;
    workspaces[key] = 0;
  }
  const int64_t address = take(device, workspace);
  std::lock_guard<std::mutex> guard(workspaces_lock);
  workspaces[key] = address;
}

inline void clear_workspaces() {
  std::map<std::pair<std::thread::id, int>, int64_t> all;
  {
    std::lock_guard<std::mutex> guard(workspaces_lock);
    all.swap(workspaces);
  }
  for (const auto& [key, address] : all) give(key.second, address);
}

}  // namespace pretended
