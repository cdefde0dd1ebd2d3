# SPDX-License-Identifier: Apache-2.0
"""What others have published, and on which network it is simulated here."""

from __future__ import annotations

from dataclasses import dataclass

from usbyte import _core


@dataclass(frozen=True)
class Cluster:
    """A network that many models are tried on.

    Attributes:
        name: Ranks and kind.
        ranks: One process each.
        alpha_s: Startup of an all_reduce, s.
        beta_s_per_byte: Of an all_reduce; reduce_scatter and all_gather cost half.
    """

    name: str
    ranks: int
    alpha_s: float
    beta_s_per_byte: float

    def network(self, serial: bool) -> _core.NetworkModel:
        """The costs; `serial`: operations start up one after the other."""
        cost = _core.AlphaBeta(self.alpha_s, self.beta_s_per_byte)
        return _core.NetworkModel(self.ranks, [cost], concurrent=int(serial))


def _ring(ranks: int, latency_s: float, gbit: float) -> Cluster:
    steps = 2 * (ranks - 1)
    return Cluster(
        f"{ranks} x {gbit:g}G ring", ranks, steps * latency_s, steps / ranks * 8e-9 / gbit
    )


def _servers(ranks: int, latency_s: float, gbit: float) -> Cluster:
    """Parameter servers on the workers: the bytes of a ring, and two messages as startup."""
    beta_s_per_byte = 2 * (ranks - 1) / ranks * 8e-9 / gbit
    return Cluster(f"{ranks} x {gbit:g}G servers", ranks, 2 * latency_s, beta_s_per_byte)


#: Measured by Shi et al., "MG-WFBP: Merging Gradients Wisely for Efficient Communication in
#: Distributed Deep Learning", TPDS 2021.
MEASURED = (
    Cluster("8 x 10GbE", 8, 5.23e-4, 8.57e-10),
    Cluster("16 x 10GbE", 16, 9.08e-4, 7.40e-10),
    Cluster("32 x 10GbE", 32, 4.04e-3, 8.64e-10),
    Cluster("64 x 10GbE", 64, 7.04e-3, 9.64e-10),
    Cluster("8 x 56G IB", 8, 9.75e-5, 3.06e-10),
    Cluster("16 x 56G IB", 16, 2.36e-4, 4.06e-10),
    Cluster("64 x 56G IB", 64, 8.06e-4, 5.89e-10),
)
_EIGHT = tuple(cluster for cluster in MEASURED if cluster.ranks == 8)
_ETHERNET_64 = tuple(cluster for cluster in MEASURED if cluster.name == "64 x 10GbE")
# Messages as in the measured clusters: 50 us over 10GbE, 5 us over InfiniBand and RoCE.
_RING_64 = (_ring(64, 5e-6, 100),)
_RINGS_128 = (_ring(128, 50e-6, 10), _ring(128, 5e-6, 56), _ring(128, 5e-6, 100))
_SERVERS_64 = (_servers(64, 5e-6, 12.5),)  # eight GPUs share a link of 100 Gb/s
_SERVERS_4 = tuple(_servers(4, 50e-6, gbit) for gbit in (1, 2, 4, 8, 16, 25))

_IMAGES = ("resnet50", "vgg16")
_ALL = ("bert", "gpt2", *_IMAGES)


@dataclass(frozen=True)
class Claim:
    """A published headline.

    Attributes:
        system: Whose.
        text: In short.
        scheme: What is praised; see `_schemes.SCHEMES`.
        baselines: What it is compared with; of several the best counts.
        models: Traces that it may be tried on.
        clusters: Networks likewise; the case that gains most counts.
        differs: What is other here than there, and why.
        factor: Published step time of the baseline over that of the scheme; None: no figure.
    """

    system: str
    text: str
    scheme: str
    baselines: tuple[str, ...]
    models: tuple[str, ...]
    clusters: tuple[Cluster, ...]
    differs: str
    factor: float | None = None


_NO_MODEL = "There is no trace of this model."
_SERVERS = (
    "Its parameter servers are simulated with the bytes of a ring and two messages as startup, "
    "eight GPUs on a link. Batch sizes differ: the ratio of compute to communication is the "
    "trace's."
)
_UNITS = (
    "One operation at a time within tensors pays a startup for each tensor, as WFBP does. The "
    "traces have 32 to 199 tensors, so that startups, not order, make up most of the time that "
    "could be saved; crossing the barrier alone gains at most 1.33x where backward takes twice as "
    "long as forward."
)
_P3 = "Four ranks with parameter servers at 1 to 25 Gb/s stand in for its cluster. "
_PIPELINED = (
    "Four slices in flight, whose startups overlap: its workers do not wait for an answer before "
    "they send the next slice. "
)
_ONE = "One slice at a time, as usbyte's `p3` sends them: each pays a startup. "
_LIMIT = (
    "The baseline overlaps with backward here, so that 1.33x, and startups, are all that can be "
    "won; what else the measured baseline lost is not simulated. "
)

CLAIMS = (
    Claim(
        "ByteScheduler (SOSP 2019)", "up to 196 % faster than without", "bytescheduler",
        ("wfbp",), _ALL, _SERVERS_64 + _SERVERS_4, _LIMIT + _SERVERS, 2.96,
    ),
    Claim(
        "ByteScheduler (SOSP 2019)", "VGG16, 64 GPUs: 2.73k to 5.42k images/s", "bytescheduler",
        ("wfbp",), ("vgg16",), _SERVERS_64, _LIMIT + _SERVERS, 5.42 / 2.73,
    ),
    Claim(
        "ByteScheduler (SOSP 2019)", "ResNet50, 64 GPUs: 11.0k to 11.6k images/s",
        "bytescheduler", ("wfbp",), ("resnet50",), _SERVERS_64, _SERVERS, 11.6 / 11.0,
    ),
    Claim(
        "ByteScheduler (SOSP 2019)", "Transformer, 64 GPUs: 108k to 145k tokens/s",
        "bytescheduler", ("wfbp",), ("bert", "gpt2"), _SERVERS_64,
        "BERT and GPT-2 stand in for the Transformer, of which there is no trace. " + _SERVERS,
        145 / 108,
    ),
    Claim(
        "P3 (MLSys 2019)", "ResNet-50, up to 25 %", "p3 pipelined", ("wfbp",), ("resnet50",),
        _SERVERS_4, _P3 + _PIPELINED, 1.25,
    ),
    Claim(
        "P3 (MLSys 2019)", "ResNet-50, up to 25 %", "p3", ("wfbp",), ("resnet50",), _SERVERS_4,
        _P3 + _ONE, 1.25,
    ),
    Claim(
        "P3 (MLSys 2019)", "VGG-19, up to 66 %", "p3 pipelined", ("wfbp",), ("vgg16",),
        _SERVERS_4, "VGG-16 stands in for VGG-19. " + _P3 + _PIPELINED + _LIMIT, 1.66,
    ),
    Claim("P3 (MLSys 2019)", "Sockeye, up to 38 %", "p3", ("wfbp",), (), (), _NO_MODEL, 1.38),
    Claim(
        "MG-WFBP (INFOCOM 2019)", "no single factor is at hand", "mgwfbp", ("wfbp",), _ALL,
        MEASURED, "Its own measured constants; what it gains is startups.",
    ),
    Claim(
        "US-Byte (TPDS 2024)", "up to 1.26x over ByteScheduler, 8 nodes", "us-byte",
        ("bytescheduler",), _ALL, _EIGHT,
        "ByteScheduler has its best sizes of 16 here: then there is little left to gain.", 1.26,
    ),
    Claim(
        "US-Byte (TPDS 2024)", "the same, over ByteScheduler's default sizes", "us-byte",
        ("bytescheduler defaults",), _ALL, _EIGHT,
        "Parts of 4 MiB and a credit of 16 MiB, as released: the part size that is tuned is never "
        "used there. Where a startup costs more, as on 64 x 10GbE, the factor is larger.", 1.26,
    ),
    Claim(
        "US-Byte (TPDS 2024)", "up to 1.56x over WFBP, 8 nodes", "us-byte", ("wfbp",), _ALL,
        _EIGHT, _UNITS, 1.56,
    ),
    Claim(
        "US-Byte (TPDS 2024)", "up to 1.69x, simulated, 128 GPUs", "us-byte", ("wfbp",), _ALL,
        _RINGS_128, "Taken to be over WFBP, on rings of three speeds. " + _UNITS + " The released "
        "simulator takes elements for bytes and loses planned bytes.", 1.69,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "up to 1.26x over ByteScheduler", "dcredit", ("bytescheduler",),
        _ALL, MEASURED, "A window shares one startup, as its authors count; ByteScheduler's "
        "parts, at their best sizes, pay one each. Where both overlap, nothing is left.", 1.26,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "the same, over ByteScheduler's default sizes", "dcredit",
        ("bytescheduler defaults",), _ALL, MEASURED, "As above, with 4 and 16 MiB.", 1.26,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "up to 1.21x over DeAR", "dcredit", ("dear 25 MiB",), _ALL,
        MEASURED, "DeAR with groups of 25 MiB; it fuses across tensors, which D-Credit does not.",
        1.21,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "up to 1.48x over PyTorch DDP", "dcredit", ("ddp",), _ALL,
        MEASURED, "DDP with buckets of 25 MiB. Its cluster and models are not known here.", 1.48,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "up to 1.53x over WFBP", "dcredit", ("wfbp",), _ALL, MEASURED,
        "Its cluster and models are not known here.", 1.53,
    ),
    Claim(
        "DeAR (ICDCS 2023)", "up to 83 % over the state of the art, 64 GPUs, 10GbE", "dear",
        ("ddp", "mgwfbp", "bytescheduler"), ("bert", "resnet50"), _ETHERNET_64,
        "Over the best of DDP, MG-WFBP and ByteScheduler; 1 + forward / (2 backward) = 1.25x is "
        "its authors' limit over an ideal WFBP, and 83 % is more.", 1.83,
    ),
    Claim(
        "DeAR (ICDCS 2023)", "the same, over ByteScheduler alone", "dear", ("bytescheduler",),
        ("bert", "resnet50"), _ETHERNET_64,
        "ByteScheduler does not merge tensors, and each costs 7 ms here; where several in flight "
        "start up at once, it is the faster one.", 1.83,
    ),
    Claim(
        "DeAR (ICDCS 2023)", "up to 15 % over the state of the art, 64 GPUs, 100 Gb/s IB", "dear",
        ("ddp", "mgwfbp", "bytescheduler"), ("bert", "resnet50"), _RING_64,
        "A link for each GPU and 5 us for a message: DDP, too, hides nearly everything.", 1.15,
    ),
    Claim(
        "PipeDAP (TETC 2025)", "up to 1.82x", "pipedap", ("wfbp",), _ALL, MEASURED,
        "Taken to be over WFBP. Of its rules only the one for the next interval is simulated. "
        + _UNITS, 1.82,
    ),
)  # fmt: skip

#: Published, and nothing that a simulator of time can tell.
NOT_SIMULATED = (
    ("D-Credit (TNSE 2025)", "energy 17.8 % and 25.1 % below ByteScheduler and WFBP",
     "Energy is not simulated; `benchmarks/compare.py` reads it where there is a counter."),
)  # fmt: skip

#: ms of a step, by an earlier simulator that shares no code with usbyte's; same traces and costs.
EARLIER = (
    ("vgg16", "8 x 56G IB", (169, 215, 213, 171, 173, 171, 170)),
    ("resnet50", "8 x 10GbE", (95, 204, 124, 115, 172, 152, 96)),
    ("bert", "64 x 56G IB", (257, 450, 305, 275, 417, 378, 268)),
    ("bert-large", "8 x 56G IB", (409, 551, 520, 435, 451, 490, 418)),
    ("gpt2", "8 x 10GbE", (427, 612, 553, 506, 512, 536, 463)),
)
EARLIER_COLUMNS = ("bound", "WFBP", "best DDP", "best DeAR", "US-Byte", "D-Credit", "auto")
