"""What was measured of a cluster and a model: a small file of JSON.

Times are seconds, sizes bytes. How the numbers are used is in `decent_dp.plan.predict`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from decent_dp.errors import ConfigurationError
from decent_dp.plan.reading import Field
from decent_dp.topology import Layout

FORMAT = "decent-dp profile"
VERSION = 1
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Rate:
    """Time of a transfer: ``latency_s + bytes / bytes_per_s``.

    Attributes:
        latency_s: Seconds until the first byte is there.
        bytes_per_s: What one worker sends per second, while all others of the pattern do the same.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Network:
    """What each pattern of traffic gets; None where the measured workers have no such pattern.

    Attributes:
        pair_inside: All workers of all nodes at once, each with one of its node.
        shards_inside: All workers at once, each sending an equal part of a tensor to all others of its node.
        pair_across: One worker of each node with one of another node.
        all_pairs_across: All workers at once, each with one of another node.
        clique_of_node: All nodes at once, each summing over its L workers. A sum over k workers counts as
            ``2 (k - 1) / k`` of the tensor sent by each.
        clique_of_two_nodes: All pairs of nodes at once, each summing over its 2 L workers; counted alike.
        all_reduce: One sum over all workers; counted alike.
    """

    pair_inside: Rate | None = None
    shards_inside: Rate | None = None
    pair_across: Rate | None = None
    all_pairs_across: Rate | None = None
    clique_of_node: Rate | None = None
    clique_of_two_nodes: Rate | None = None
    all_reduce: Rate | None = None


@dataclass(frozen=True, slots=True)
class BucketTime:
    """One bucket of parameters.

    Attributes:
        bytes: Its size in the dtype of the parameters.
        ready_s: Seconds from the start of backward until all of its gradients are there.
    """

    bytes: int
    ready_s: float


@dataclass(frozen=True, slots=True)
class Compute:
    """What a worker does without the others.

    Attributes:
        forward_s: Forward of one step, mean over workers.
        backward_s: Backward, without any update.
        update_s: The optimizer, over all parameters.
        mix_s: What a pass that mixes what arrived into all parameters adds to the update, while others travel.
        narrow_s: What a wire dtype of half the width costs on top: to round what is sent, and to mix the difference.
        travel_s: What forward and backward take longer while one copy of the parameters travels.
        buckets: In the order in which backward completes them.
        worker_factors: Mean time of forward and backward of each worker over the mean of all; one number a worker.
        jitter_quantiles: Equally spaced quantiles, from the smallest to the largest, of the time of forward and
            backward in one step over the mean of its worker; all 1 without jitter.
    """

    forward_s: float
    backward_s: float
    update_s: float
    buckets: tuple[BucketTime, ...]
    mix_s: float = 0.0
    narrow_s: float = 0.0
    travel_s: float = 0.0
    worker_factors: tuple[float, ...] = (1.0,)
    jitter_quantiles: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, slots=True)
class Profile:
    """A cluster and a model.

    Attributes:
        num_workers: n.
        workers_per_node: L, a divisor of n.
        device: Where the parameters are, ``cpu`` or ``cuda``: how averages are carried out depends on it.
        element_bytes: Of an element of the parameters.
        compute: What a worker does alone.
        network: What it takes to move bytes.
        notes: When, where and with what it was measured; free text.
    """

    num_workers: int
    workers_per_node: int
    device: str
    element_bytes: int
    compute: Compute
    network: Network
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Layout(self.num_workers, self.workers_per_node)

    @property
    def layout(self) -> Layout:
        """The workers and nodes."""
        return Layout(self.num_workers, self.workers_per_node)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(bucket.bytes for bucket in self.compute.buckets)

    def to_json(self) -> str:
        """The text of the file."""
        whole = {"format": FORMAT, "version": VERSION, **asdict(self), "notes": dict(self.notes)}
        return json.dumps(whole, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that `save` wrote.

        Raises:
            ConfigurationError: If it is no such file; names the field that is wrong.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigurationError(
                f"profile {path} cannot be read ({reason}); 'decent-dp measure' under torchrun writes one"
            ) from None
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Profile:
        """Read the text of a file.

        Args:
            text: What `to_json` returned.
            where: How messages call the file.

        Raises:
            ConfigurationError: If it is no such text; names the field that is wrong.
        """
        name = f"profile {where}".strip()
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{name} is no JSON ({error}); measure again") from None
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise ConfigurationError(
                f"{name} is no profile: its field 'format' must be {FORMAT!r}; 'decent-dp measure' writes one"
            )
        if whole.get("version") != VERSION:
            raise ConfigurationError(
                f"{name}: version is {whole.get('version')!r}; this version of decent-dp reads {VERSION}; measure again"
            )
        return _profile(Field(name, "", whole))


def _profile(whole: Field) -> Profile:
    whole.refuse_unknown({"format", "version", *(f.name for f in fields(Profile))})
    num_workers = whole["num_workers"].integer(1)
    workers_per_node = whole["workers_per_node"].integer(1)
    if num_workers % workers_per_node:
        whole["workers_per_node"].refuse(f"a divisor of num_workers = {num_workers}")
    device = whole["device"].choice(_DEVICES)
    compute = _compute(whole["compute"], num_workers)
    network = _network(whole["network"], Layout(num_workers, workers_per_node))
    element_bytes = whole["element_bytes"].integer(1)
    notes = whole["notes"].texts() if "notes" in whole else {}
    return Profile(num_workers, workers_per_node, device, element_bytes, compute, network, notes)


def _compute(compute: Field, num_workers: int) -> Compute:
    compute.refuse_unknown({f.name for f in fields(Compute)})
    backward_s = compute["backward_s"].number(0)
    buckets = []
    for bucket in compute["buckets"].items():
        bucket.refuse_unknown({"bytes", "ready_s"})
        buckets.append(BucketTime(bucket["bytes"].integer(1), bucket["ready_s"].number(0)))
        earliest = buckets[-2].ready_s if len(buckets) > 1 else 0.0
        if not earliest <= buckets[-1].ready_s <= backward_s * (1 + 1e-9):
            bucket["ready_s"].refuse(f"between that of the bucket before and backward_s = {backward_s:g}")
    factors = compute["worker_factors"].numbers(above=0)
    if len(factors) != num_workers:
        compute["worker_factors"].refuse(f"one number for each of the {num_workers} workers")
    quantiles = compute["jitter_quantiles"].numbers(above=0)
    if list(quantiles) != sorted(quantiles):
        compute["jitter_quantiles"].refuse("ascending")
    return Compute(
        compute["forward_s"].number(0),
        backward_s,
        compute["update_s"].number(0),
        tuple(buckets),
        compute["mix_s"].number(0),
        compute["narrow_s"].number(0),
        compute["travel_s"].number(0),
        factors,
        quantiles,
    )


def needed_patterns(layout: Layout) -> Sequence[str]:
    """Names of the patterns of `Network` that workers in this layout have."""
    inside = ["pair_inside", "shards_inside", "clique_of_node"] if layout.workers_per_node > 1 else []
    across = ["pair_across", "all_pairs_across", "clique_of_two_nodes"] if layout.num_nodes > 1 else []
    return [*inside, *across, *(["all_reduce"] if layout.num_workers > 1 else [])]


def _network(network: Field, layout: Layout) -> Network:
    network.refuse_unknown({f.name for f in fields(Network)})
    rates: dict[str, Rate | None] = {}
    needed = needed_patterns(layout)
    for pattern in fields(Network):
        if pattern.name not in network or network[pattern.name].value is None:
            if pattern.name in needed:
                network[pattern.name].refuse("an object with latency_s and bytes_per_s: these workers have the pattern")
            rates[pattern.name] = None
            continue
        rate = network[pattern.name]
        rate.refuse_unknown({"latency_s", "bytes_per_s"})
        rates[pattern.name] = Rate(rate["latency_s"].number(0), rate["bytes_per_s"].number(1))
    return Network(**rates)
