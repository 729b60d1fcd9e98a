"""Batch samplers for torch's DataLoader.

They deal the examples out to several ranks, and they resume in the middle of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch.utils.data import Sampler

from helpers.batching import (
    Batch,
    bucketed,
    checked_lengths,
    cut,
    generator,
    padded_length,
    permutation,
)
from tight_fit.checks import MOST_SEED, whole


class _BatchSampler(Sampler):
    """The batches of one rank in one epoch, and how many of them have been handed out."""

    def __init__(
        self,
        lengths: Sequence[int],
        window: int,
        seed: int,
        drop_last: bool,
        rank: int,
        ranks: int,
        **settings: int,
    ):
        self.lengths = checked_lengths(lengths)
        self.window = whole("window", window, 1)
        self.seed = whole("seed", seed, 0, MOST_SEED)
        self.drop_last = bool(drop_last)
        self.rank, self.ranks = whole("rank", rank, 0), whole("ranks", ranks, 1)
        if self.rank >= self.ranks:
            raise ValueError(f"rank={rank} does not exist among {ranks} ranks: they count from 0.")
        if len(self.lengths) < self.ranks:
            raise ValueError(
                f"{len(self.lengths)} examples are too few for {ranks} ranks: each rank needs one "
                "per step."
            )
        self.epoch = self._done = self._resume = 0
        self._settings = {  # the keys are part of saved states
            "rows": len(self.lengths),
            "tokens_in_all": sum(self.lengths),
            "window": self.window,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "ranks": self.ranks,
            **settings,
        }

    def _steps(self) -> list[list[Batch]]:
        """For each step of the current epoch the batch of each rank."""
        raise NotImplementedError

    def batches(self) -> list[Batch]:
        """All batches of this rank in the current epoch."""
        return [step[self.rank] for step in self._steps()]

    def __len__(self) -> int:
        """Steps of the whole current epoch: the same on all ranks, also for a resumed run."""
        return len(self._steps())

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        It changes nothing for the current epoch, which may be half done. Raises ValueError or
        TypeError for an epoch that is no whole number from 0 on.
        """
        if whole("epoch", epoch, 0) != self.epoch:
            self.epoch, self._done, self._resume = epoch, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        self._done, self._resume = self._resume, 0
        return self._from(self.batches()[self._done :])

    def _from(self, batches: list[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position of the run, the same on all ranks and ready for JSON.

        "epoch" and "done" (the number of batches handed out), beside the settings of the order. A
        plain DataLoader with workers asks for batches ahead of the training: in that case put the
        number of steps that were really made into "done".
        """
        return {"epoch": self.epoch, "done": self._done, **self._settings}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next iteration begin after the first "done" batches of the state's epoch.

        Raises ValueError for the state of another order and for one beyond the end of the epoch,
        TypeError for one without "epoch" or "done".
        """
        different = [name for name, value in self._settings.items() if state.get(name) != value]
        if different:
            name = different[0]
            raise ValueError(
                f"The saved order had {name}={state.get(name)}, this one has "
                f"{self._settings[name]}: resume with the same data and settings."
            )
        epoch, done = whole("epoch", state.get("epoch"), 0), whole("done", state.get("done"), 0)
        before, self.epoch = self.epoch, epoch
        steps = len(self)
        if done > steps:
            self.epoch = before
            raise ValueError(
                f"The saved order had done={done} batches of an epoch of {steps}: the state is "
                "damaged."
            )
        self._done = self._resume = done


class BucketBatchSampler(_BatchSampler):
    """Batches of `batch_size` examples of similar length, in the order of `batching.bucketed`.

    Give it to a DataLoader as batch_sampler, and call set_epoch before each epoch. `state_dict` and
    `load_state_dict` resume inside an epoch; they follow the protocol of torchdata's
    StatefulDataLoader.

    Ranks: the epoch is made in batches of batch_size * ranks examples, and the examples of each are
    dealt out one by one. All ranks therefore make the same number of steps, and in every step they
    get examples of similar length. Over all ranks every example comes exactly once, where torch's
    DistributedSampler would repeat some. In the last step the ranks have fewer examples, and their
    numbers differ by at most one; where fewer examples than ranks remain, the last two steps share
    theirs.

    lengths    tokens per example
    window     batches per window, see `bucketed`
    drop_last  leave out the examples % (batch_size * ranks) that remain

    Raises ValueError or TypeError for fewer examples than ranks. With drop_last it also raises
    ValueError for fewer examples than one full step; without it, for batch_size=1 and a number of
    examples that the ranks do not divide, since equal steps of one example cannot hold them.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        window: int = 32,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.batch_size = whole("batch_size", batch_size, 1)
        super().__init__(lengths, window, seed, drop_last, rank, ranks, batch_size=batch_size)
        examples, self.step_examples = len(self.lengths), self.batch_size * self.ranks
        if drop_last and examples < self.step_examples:
            raise ValueError(
                f"{examples} examples make no full step of {self.step_examples}, and drop_last "
                "leaves out the rest: lower batch_size, or set drop_last=False."
            )
        if not drop_last and self.batch_size == 1 and examples % ranks:
            raise ValueError(
                f"{examples} examples cannot be dealt one by one to {ranks} ranks in equal steps: "
                "use batch_size=2 or more, or drop_last=True."
            )

    def __len__(self) -> int:
        examples = len(self.lengths)
        if self.drop_last:
            return examples // self.step_examples
        return math.ceil(examples / self.step_examples)

    def _steps(self) -> list[list[Batch]]:
        size = self.step_examples
        groups = bucketed(self.lengths, size, size, self.window, self.seed, self.epoch)
        steps = [group[0] for group in groups]
        if self.drop_last:
            steps = steps[: len(self)]
        elif len(steps[-1]) < self.ranks:
            tail = sorted(steps.pop() + steps.pop(), key=self.lengths.__getitem__)
            steps += [tail[: len(tail) // 2], tail[len(tail) // 2 :]]
        return [[step[rank :: self.ranks] for rank in range(self.ranks)] for step in steps]


class TokenBudgetBatchSampler(_BatchSampler):
    """Batches with a constant number of tokens: examples * padded length <= tokens.

    It is used as `BucketBatchSampler` is. The padded length is that of the longest example, rounded
    up to `multiple_of`; a window holds about `window` batches. The number of examples differs from
    step to step, so a mean over the examples of a step gives those of long batches more weight:
    multiply the loss by examples / mean number of examples, or accept the difference.

    Ranks: all ranks make the same number of steps; where batches are missing for that, the fullest
    ones are halved. Over all ranks every example comes exactly once. The number of steps may differ
    from epoch to epoch.

    lengths    tokens per example
    tokens     padded tokens per batch, at most
    drop_last  leave out fewer than `ranks` batches per epoch and halve none

    Raises ValueError or TypeError for an example that is longer than the budget and for fewer
    examples than ranks. When it makes the batches of an epoch, it raises ValueError if every batch
    holds one example and the ranks do not divide their number.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        tokens: int,
        window: int = 32,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
        multiple_of: int = 8,
    ):
        self.tokens = whole("tokens", tokens, 1)
        self.multiple_of = whole("multiple_of", multiple_of, 1)
        super().__init__(
            lengths, window, seed, drop_last, rank, ranks, tokens=tokens, multiple_of=multiple_of
        )
        self.padded_lengths = [padded_length(length, multiple_of) for length in self.lengths]
        longest = max(self.padded_lengths)
        if longest > tokens:
            raise ValueError(
                f"Example {self.padded_lengths.index(longest)} takes {longest} padded tokens, more "
                f"than the budget of {tokens}: raise tokens or truncate the document."
            )

    def _steps(self) -> list[list[Batch]]:
        rng = generator(self.seed, self.epoch)
        order = permutation(len(self.lengths), rng)
        batch_size = max(1, self.tokens * len(order) // sum(self.padded_lengths))  # about
        batches = [
            batch
            for examples in cut(order, self.window * batch_size)
            for batch in self._fill(examples)
        ]
        missing = 0 if self.drop_last and len(batches) >= self.ranks else -len(batches) % self.ranks
        for _ in range(missing):
            fullest = max(range(len(batches)), key=lambda index: len(batches[index]))
            full = batches.pop(fullest)
            if len(full) == 1:
                raise ValueError(
                    f"{len(order)} examples that fill the budget one by one cannot be dealt to "
                    f"{self.ranks} ranks in equal steps: raise tokens, or set drop_last=True."
                )
            batches += [full[: len(full) // 2], full[len(full) // 2 :]]
        mixed = [batches[index] for index in permutation(len(batches), rng)]
        return cut(mixed[: len(mixed) - len(mixed) % self.ranks], self.ranks)

    def _fill(self, examples: Sequence[int]) -> list[Batch]:
        """Batches within the budget, filled from the shortest example to the longest."""
        batches: list[Batch] = [[]]
        for example in sorted(examples, key=self.lengths.__getitem__):
            if (len(batches[-1]) + 1) * self.padded_lengths[example] > self.tokens:
                batches.append([])
            batches[-1].append(example)
        return batches
