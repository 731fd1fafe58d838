"""Draw one step from a real trace: backward, bucket updates, exchanges travelling under the next step.

    python benchmarks/trace_step.py                 writes docs/images/step.png

Starts gloo workers on this machine, trains a small transformer with the exp topology, records when things begin
and end on worker 0, and draws two consecutive steps. What is drawn was measured: the communicator and the optimizers
are wrapped from outside, the library is not changed for it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from decent_dp import DecentralizedDataParallel
from decent_dp.comm import Handle, TorchCommunicator

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Span(NamedTuple):
    """Something that took time: what, which bucket (-1: none), and seconds on the clock of this process."""

    kind: str
    bucket: int
    begin_s: float
    end_s: float


class TracedHandle:
    """Waits in a thread, to note when the transfer really ended, whoever waits for it later."""

    def __init__(self, inner: Handle, bucket: int, spans: list[Span]) -> None:
        self._error: BaseException | None = None
        begin = time.perf_counter()

        def wait() -> None:
            try:
                inner.wait()
            except BaseException as error:
                self._error = error
            spans.append(Span("exchange", bucket, begin, time.perf_counter()))

        self._thread = threading.Thread(target=wait, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Join the thread."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class TracedCommunicator(TorchCommunicator):
    """Notes when exchanges start and end; the bucket is in the tag."""

    def __init__(self, spans: list[Span]) -> None:
        super().__init__()
        self._spans = spans

    def start_swap(
        self,
        payloads: Sequence[Tensor],
        send_to: Sequence[int],
        receive_from: Sequence[int],
        buffers: Sequence[Tensor],
        tag: int,
        *,
        in_turn: bool = False,
    ) -> Any:
        """Start the exchange and a thread that waits for it."""
        inner = super().start_swap(payloads, send_to, receive_from, buffers, tag, in_turn=in_turn)
        return TracedHandle(inner, tag >> 2 & 0xFFFF, self._spans)


class TracedAdamW(torch.optim.AdamW):
    """Notes when updates begin and end."""

    def __init__(self, named: Any, bucket: int, spans: list[Span]) -> None:
        super().__init__(named, lr=1e-3, fused=True)
        self._bucket, self._spans = bucket, spans

    def step(self, closure: Any = None) -> Any:
        """Update the bucket."""
        begin = time.perf_counter()
        super().step(closure)
        self._spans.append(Span("update", self._bucket, begin, time.perf_counter()))


def train(rank: int, num_workers: int, folder: str, num_steps: int) -> None:
    """One worker; worker 0 leaves its spans in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_workers)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    network = nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(256, 256))
    spans: list[Span] = []
    numbers = iter(range(1000))
    model = DecentralizedDataParallel(
        network,
        lambda named: TracedAdamW(named, next(numbers), spans),
        topology="exp",
        bucket_size_in_mb=4,
        communicator=TracedCommunicator(spans),
    )
    for _ in range(num_steps):
        x = torch.randn(8, 64, 256)
        begin = time.perf_counter()
        loss = model(x).square().mean()
        middle = time.perf_counter()
        loss.backward()
        spans += [Span("forward", -1, begin, middle), Span("backward", -1, middle, time.perf_counter())]
    model.synchronize()
    if rank == 0:
        torch.save([tuple(span) for span in spans], Path(folder) / "spans.pt")
    dist.barrier()
    dist.destroy_process_group()


def draw(spans: list[Span], num_steps: int, path: Path) -> None:
    """Draw the last two steps but one: computing above, updates below it, then one line of exchanges per bucket."""
    forwards = [span for span in spans if span.kind == "forward"]
    first, last = forwards[num_steps - 3], forwards[num_steps - 1]
    shown = [s for s in spans if s.end_s > first.begin_s and s.begin_s < last.begin_s]
    num_buckets = 1 + max(s.bucket for s in spans)
    colors = plt.get_cmap("viridis")([(k + 0.5) / num_buckets for k in range(num_buckets)])
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    computing = {"forward": "#c6c6c6", "backward": "#8d8d8d"}
    for span in shown:
        begin, length = 1000 * (span.begin_s - first.begin_s), 1000 * (span.end_s - span.begin_s)
        if span.kind in computing:
            axes.barh(0, length, left=begin, height=0.8, color=computing[span.kind])
            axes.text(begin + length / 2, 0, span.kind, ha="center", va="center", fontsize=9)
        elif span.kind == "update":
            axes.barh(1, length, left=begin, height=0.8, color=colors[span.bucket])
        else:
            axes.barh(2 + span.bucket, length, left=begin, height=0.7, color=colors[span.bucket])
    axes.set_yticks(
        range(2 + num_buckets),
        ["compute", "update", *(f"exchange, bucket {k}" for k in range(num_buckets))],
        fontsize=9,
    )
    for forward in (forwards[num_steps - 2], last):
        axes.axvline(1000 * (forward.begin_s - first.begin_s), color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1000 * (last.begin_s - first.begin_s))
    axes.invert_yaxis()
    axes.set_xlabel("ms on worker 0; dotted: backward() returns and the next step begins")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the workers and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of workers (default: 2)")
    parser.add_argument("--steps", type=int, default=12, help="steps to train; the last but one is drawn (default: 12)")
    parser.add_argument("--output", type=Path, default=Path("docs/images/step.png"), help="the picture")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.workers, folder, options.steps)
        mp.spawn(train, arguments, nprocs=options.workers)
        spans = [Span(*span) for span in torch.load(Path(folder) / "spans.pt", weights_only=True)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(spans, options.steps, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
