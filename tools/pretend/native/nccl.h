// NCCL's part of torch.distributed, over gloo: ranks on GPUs exchange messages through the host.
//
// Collectives hand aliases of their tensors to gloo; the first one of a group sees that each rank
// has a GPU of its own, as NCCL does. Messages between two ranks keep NCCL's order: those of one communicator run one after the other, so a rank that wants to receive from another
// first waits until that one has taken what it was sent. Two ranks that both send first wait for
// each other for ever over NCCL; here they get an error after `PATIENCE`.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "kernels.h"

namespace pretended {

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;
constexpr std::chrono::milliseconds PATIENCE{20000};
constexpr int TAKEN = 1 << 20;  // the tag of the answer to a message is its own and this

inline Tensors on_host(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
    made.push_back(on_host(tensor));
  }
  return made;
}
inline std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> made;
  for (const auto& tensors : lists) made.push_back(on_host(tensors));
  return made;
}

// A work that is done after another one, and then does something more.
struct Then final : Work {
  WorkPtr first;
  std::function<void()> more;
  bool done = false;
  Then(WorkPtr first, std::function<void()> more)
      : Work(-1, c10d::OpType::UNKNOWN), first(std::move(first)), more(std::move(more)) {}
  bool isCompleted() override { return first->isCompleted(); }
  bool isSuccess() const override { return first->isSuccess(); }
  bool wait(std::chrono::milliseconds timeout) override {
    first->wait(timeout);
    if (!done) more();
    done = true;
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return first->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    return first->getFuture();
  }
};

// Works that were begun as one group.
struct All final : Work {
  std::vector<WorkPtr> works;
  explicit All(std::vector<WorkPtr> works)
      : Work(-1, c10d::OpType::COALESCED), works(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works.begin(), works.end(), [](auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works) work->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
};

struct OverGloo final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::map<int, std::vector<std::pair<WorkPtr, Tensor>>> sent;  // answers that a rank still owes
  bool grouped = false;  // between start and end of a group no message waits for another
  std::vector<WorkPtr> group;

  explicit OverGloo(const c10::intrusive_ptr<c10d::Backend>& gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo) {
    setGroupUid(gloo->getGroupUid());
    setGroupDesc(gloo->getGroupDesc());
  }
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  bool connected = false;
  // NCCL connects a group at its first collective, and refuses two ranks on one GPU.
  void connect(int device) {
    if (std::exchange(connected, true)) return;
    Tensors mine{at::full({1}, device, at::kInt)}, all;
    for (int rank = 0; rank < getSize(); ++rank) all.push_back(at::empty({1}, at::kInt));
    std::vector<Tensors> found{all};
    gloo->allgather(found, mine, c10d::AllgatherOptions())->wait();
    for (int rank = 0; rank < getSize(); ++rank)
      for (int other = 0; other < rank; ++other)
        TORCH_CHECK(all[rank].item<int>() != all[other].item<int>(),
                    "NCCL error: Duplicate GPU detected : rank ", rank, " and rank ", other,
                    " both on CUDA device ", all[rank].item<int>());
  }
  Tensors ours(const Tensors& tensors) {
    auto host = on_host(tensors);
    if (!tensors.empty()) connect(tensors[0].device().index());
    return host;
  }
  std::vector<Tensors> ours(const std::vector<Tensors>& lists) {
    std::vector<Tensors> made;
    for (const auto& tensors : lists) made.push_back(ours(tensors));
    return made;
  }

  // gloo knows no mean: it adds, and the sum is divided.
  template <typename Options>
  std::pair<Options, bool> summed(const Options& options) {
    Options changed = options;
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) changed.reduceOp = c10d::ReduceOp::SUM;
    return {changed, mean};
  }
  WorkPtr divided(WorkPtr work, Tensors tensors, bool mean) {
    if (!mean) return work;
    return c10::make_intrusive<Then>(work, [tensors, ranks = getSize()] {
      for (auto tensor : tensors) tensor.div_(ranks);
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = ours(tensors);
    return gloo->broadcast(host, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = ours(tensors);
    auto [changed, mean] = summed(options);
    return divided(gloo->allreduce(host, changed), host, mean);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    auto host = ours(tensors);
    auto [changed, mean] = summed(options);
    return divided(gloo->allreduce_coalesced(host, changed), host, mean);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = ours(tensors);
    return gloo->reduce(host, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    auto out = ours(outputs);
    auto in = ours(inputs);
    return gloo->allgather(out, in, options);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    auto out = ours(Tensors{output}), in = ours(Tensors{input});
    return gloo->_allgather_base(out[0], in[0], options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto out = ours(outputs), in = ours(inputs);
    return gloo->allgather_into_tensor_coalesced(out, in, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    auto out = ours(outputs);
    auto in = ours(inputs);
    return gloo->gather(out, in, options);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    auto out = ours(outputs);
    auto in = ours(inputs);
    return gloo->scatter(out, in, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    auto out = ours(outputs);
    auto in = ours(inputs);
    auto [changed, mean] = summed(options);
    return divided(gloo->reduce_scatter(out, in, changed), out, mean);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    auto out = ours(Tensors{output}), in = ours(Tensors{input});
    auto [changed, mean] = summed(options);
    return divided(gloo->_reduce_scatter_base(out[0], in[0], changed), out, mean);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto out = ours(outputs), in = ours(inputs);
    auto [changed, mean] = summed(options);
    return divided(gloo->reduce_scatter_tensor_coalesced(out, in, changed), out, mean);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& outputs,
                        std::vector<int64_t>& inputs,
                        const c10d::AllToAllOptions& options) override {
    auto out = ours(Tensors{output}), in = ours(Tensors{input});
    return gloo->alltoall_base(out[0], in[0], outputs, inputs, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto host = on_host(tensors);
    auto work = gloo->send(host, to, tag);
    Tensors answer{at::empty({1}, at::kByte)};
    sent[to].emplace_back(gloo->recv(answer, to, tag + TAKEN), answer[0]);
    return begun(work);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    if (!grouped) wait_until_taken(from);
    auto host = on_host(tensors);
    auto work = gloo->recv(host, from, tag);
    return begun(c10::make_intrusive<Then>(work, [this, from, tag] {
      Tensors answer{at::zeros({1}, at::kByte)};
      gloo->send(answer, from, tag + TAKEN)->wait();
    }));
  }
  void wait_until_taken(int from) {
    for (auto& [answer, kept] : sent[from]) {
      bool taken = false;
      try {
        taken = answer->wait(PATIENCE);
      } catch (const std::exception&) {
      }
      TORCH_CHECK(taken, "Ranks ", getRank(), " and ", from, " both sent before they received: ",
                  "over NCCL they would wait for each other for ever.");
    }
    sent[from].clear();
  }
  WorkPtr begun(WorkPtr work) {
    if (grouped) group.push_back(work);
    return work;
  }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { grouped = true; }
  WorkPtr endCoalescing() override {
    grouped = false;
    auto all = c10::make_intrusive<All>(std::move(group));
    group.clear();
    return all;
  }
};

// DistributedDataParallel measures its phases; on a real GPU by events, here by the clock.
struct Clock final : c10d::Timer {
  explicit Clock(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    if (!from || !to || *to < *from) return std::nullopt;
    return *to - *from;
  }
};

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Give a group NCCL for its GPUs, over the gloo that it has: for the GPUs alone, or for the CPU.
inline void add_nccl(const Group& group, bool alone) {
  auto gloo = group->getBackend(alone ? DeviceType::CUDA : DeviceType::CPU);
  group->setBackend(DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL,
                    c10::make_intrusive<OverGloo>(gloo));
}

}  // namespace pretended
