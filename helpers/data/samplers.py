"""Samplers of batches for torch's DataLoader: over ranks, and resumable in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.utils.data import Sampler

from helpers.data.batching import (
    Batch,
    bucketed,
    checked_lengths,
    cut,
    generator,
    padded_length,
    permutation,
    seed_in_range,
    whole,
)


class _BatchSampler(Sampler):
    """An epoch's batches for one rank, with the place that the run has reached."""

    def __init__(self, lengths, window, seed, drop_last, rank, ranks, **settings: int):
        self.lengths, self.window, self.seed = (
            checked_lengths(lengths),
            whole("window", window),
            seed_in_range(seed),
        )
        self.drop_last, self.rank, self.ranks = (
            bool(drop_last),
            whole("rank", rank, 0),
            whole("ranks", ranks),
        )
        if self.rank >= self.ranks:
            raise ValueError(f"rank={rank} does not exist among {ranks} ranks: they count from 0.")
        if len(self.lengths) < self.ranks:
            raise ValueError(
                f"{len(self.lengths)} rows are too few for {ranks} ranks: each needs one a step."
            )
        self.epoch = self._done = self._resume = 0
        self._settings = dict(
            rows=len(self.lengths),
            tokens_in_all=sum(self.lengths),
            window=self.window,
            seed=self.seed,
            drop_last=self.drop_last,
            ranks=self.ranks,
            **settings,
        )

    def _steps(self) -> list[list[Batch]]:
        """For each step of the current epoch the batch of each rank."""
        raise NotImplementedError

    def batches(self) -> list[Batch]:
        """All batches of this rank in the current epoch."""
        return [step[self.rank] for step in self._steps()]

    def __len__(self) -> int:
        """Steps of the whole current epoch, the same on all ranks, wherever a resumed run begins."""
        return len(self._steps())

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; for the current epoch, which may be half done, it changes nothing."""
        if whole("epoch", epoch, 0) != self.epoch:
            self.epoch, self._done, self._resume = int(epoch), 0, 0

    def __iter__(self) -> Iterator[Batch]:
        self._done, self._resume = self._resume, 0
        return self._from(self.batches()[self._done :])

    def _from(self, batches: list[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the run is, as JSON can hold it; the same on all ranks: "epoch", "done" (batches handed out), settings.

        A plain DataLoader with workers asks for batches ahead of the training: put the steps really made into "done".
        """
        return {"epoch": self.epoch, "done": self._done, **self._settings}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration gives the batches after "done". Raises ValueError for the state of another order."""
        wrong = [name for name, value in self._settings.items() if state.get(name) != value]
        if wrong:
            raise ValueError(
                f"The saved order had {wrong[0]}={state.get(wrong[0])}, this one has "
                f"{self._settings[wrong[0]]}: resume with the same data and settings."
            )
        epoch, done = whole("epoch", state.get("epoch"), 0), whole("done", state.get("done"), 0)
        before, self.epoch = self.epoch, epoch
        steps = len(self)
        if done > steps:
            self.epoch = before
            raise ValueError(
                f"The saved order had done={done} batches of an epoch of {steps}: the state is damaged."
            )
        self._done = self._resume = done


class BucketBatchSampler(_BatchSampler):
    """Batches of `batch_size` rows of like length, as `bucketed` makes them: a DataLoader's batch_sampler.

    Call set_epoch before each epoch; state_dict and load_state_dict resume inside one (StatefulDataLoader's protocol).

    Ranks: the epoch is made in batches of batch_size * ranks rows, and each is dealt out one by one, so that all ranks
    make the same number of steps and meet rows of like length in the same step. Every row comes once over all ranks; in
    the last step, or the last two (halved when fewer rows than ranks remain), they have fewer rows, by at most one from
    rank to rank. torch's DistributedSampler repeats rows instead.
    drop_last: the rows % (batch_size * ranks) that remain are left out of the epoch.

    Raises ValueError or TypeError: fewer rows than ranks; with drop_last fewer than one full step; without it
    batch_size=1 and rows that the ranks do not divide (equal steps of one row cannot hold them).
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
        self.batch_size = whole("batch_size", batch_size)
        super().__init__(lengths, window, seed, drop_last, rank, ranks, batch_size=batch_size)
        rows, self.step_rows = len(self.lengths), self.batch_size * self.ranks
        if drop_last and rows < self.step_rows:
            raise ValueError(
                f"{rows} rows make no full step of {self.step_rows}, and drop_last leaves out the rest: "
                "lower batch_size, or set drop_last=False."
            )
        if not drop_last and self.batch_size == 1 and rows % ranks:
            raise ValueError(
                f"{rows} rows cannot be dealt one by one to {ranks} ranks in equal steps: use "
                "batch_size=2 or more, or drop_last=True."
            )

    def __len__(self) -> int:
        rows = len(self.lengths)
        return rows // self.step_rows if self.drop_last else -(-rows // self.step_rows)

    def _steps(self) -> list[list[Batch]]:
        rows = self.step_rows
        steps = [
            group[0]
            for group in bucketed(self.lengths, rows, rows, self.window, self.seed, self.epoch)
        ]
        if self.drop_last:
            steps = steps[: len(self)]
        elif len(steps[-1]) < self.ranks:
            tail = sorted(steps.pop() + steps.pop(), key=self.lengths.__getitem__)
            steps += [tail[: len(tail) // 2], tail[len(tail) // 2 :]]
        return [[step[rank :: self.ranks] for rank in range(self.ranks)] for step in steps]


class TokenBudgetBatchSampler(_BatchSampler):
    """Batches of constant tokens, not of constant rows: rows * padded length <= tokens. Protocol of BucketBatchSampler.

    The padded length is the longest row's, rounded up to `multiple_of`. A window holds about `window` batches. A step's
    rows vary, so a mean over them weighs a row of a long batch more: scale the loss by rows / mean rows, or mean it.

    Ranks: all make the same number of steps; where batches lack for that, the fullest are halved. Every row comes once
    over all ranks. drop_last: fewer than `ranks` batches are left out instead. The number of steps may differ from
    epoch to epoch.

    Raises ValueError or TypeError: a row longer than the budget; fewer rows than ranks; and, when the batches of an
    epoch are made, rows that fill the budget one by one and that the ranks do not divide.
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
        self.tokens, self.multiple_of = whole("tokens", tokens), whole("multiple_of", multiple_of)
        super().__init__(
            lengths, window, seed, drop_last, rank, ranks, tokens=tokens, multiple_of=multiple_of
        )
        self.widths = [padded_length(length, multiple_of) for length in self.lengths]
        if max(self.widths) > tokens:
            row = self.widths.index(max(self.widths))
            raise ValueError(
                f"Row {row} takes {self.widths[row]} padded tokens, more than the budget of {tokens}: "
                "raise tokens or truncate the document."
            )

    def _steps(self) -> list[list[Batch]]:
        rng = generator(self.seed, self.epoch)
        order = permutation(len(self.lengths), rng)
        window = self.window * max(1, self.tokens * len(order) // sum(self.widths))
        batches = [batch for rows in cut(order, window) for batch in self._fill(rows)]
        missing = 0 if self.drop_last and len(batches) >= self.ranks else -len(batches) % self.ranks
        for _ in range(missing):
            full = batches.pop(max(range(len(batches)), key=lambda place: len(batches[place])))
            if len(full) == 1:
                raise ValueError(
                    f"{len(order)} rows that fill the budget one by one cannot be dealt to {self.ranks} "
                    "ranks in equal steps: raise tokens, or set drop_last=True."
                )
            batches += [full[: len(full) // 2], full[len(full) // 2 :]]
        mixed = [batches[place] for place in permutation(len(batches), rng)]
        return cut(mixed[: len(mixed) - len(mixed) % self.ranks], self.ranks)

    def _fill(self, rows: Sequence[int]) -> list[Batch]:
        batches: list[Batch] = [[]]
        for row in sorted(rows, key=self.lengths.__getitem__):
            if (len(batches[-1]) + 1) * self.widths[row] > self.tokens:
                batches.append([])
            batches[-1].append(row)
        return batches
