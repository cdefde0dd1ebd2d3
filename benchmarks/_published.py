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


def _scaled(cluster: Cluster, ranks: int) -> Cluster:
    """More ranks as the code of D-Credit scales them: bytes by 2 (n - 1) / n, equal startups."""
    ring = (ranks - 1) / ranks * cluster.ranks / (cluster.ranks - 1)
    name = f"{cluster.name.partition(', ')[0]}, {ranks} ranks, scaled"
    return Cluster(name, ranks, cluster.alpha_s, cluster.beta_s_per_byte * ring)


#: Constants in the released code of US-Byte (ZJU-CNLAB/US-Byte, dist_trainer_US-Byte.py, 625318f)
#: and D-Credit (ZJU-CNLAB/D-Credit, dist_trainer_D-Credit.py, 372425b). Their s per byte are
#: multiplied by parameters there, which is taken to be the known defect.
_USBYTE_8 = Cluster("US-Byte's constants, 8 ranks", 8, 1318.6e-6, 2.406e-10)
_DCREDIT_4 = Cluster("D-Credit's constants, 4 ranks", 4, 422.7e-6, 3.02e-10)
_DCREDIT = (_DCREDIT_4, _scaled(_DCREDIT_4, 8), _scaled(_DCREDIT_4, 128))
#: Times that the authors of US-Byte, D-Credit and PipeDAP have published.
_ZJU_JOBS = ("zju_vgg16", "zju_resnet50", "zju_densenet201")
#: In the released code of DeAR (lzhangbv/dear_pytorch, mgwfbp/dopt.py, 249a7e9), for its RDMA and
#: its 10GbE; DenseNet-201 is one of its models.
_DEAR_JOBS = ("bert", "resnet50", "zju_densenet201")
_DEAR_RDMA_64 = tuple(cluster for cluster in MEASURED if cluster.name == "64 x 56G IB")

_IMAGES = ("resnet50", "vgg16")
_ALL = ("bert", "gpt2", *_IMAGES)


@dataclass(frozen=True)
class Claim:
    """A published headline.

    Attributes:
        system: Whose.
        text: In short.
        variant: What is praised; see `_published_policies.VARIANTS`.
        baselines: What it is compared with; of several the best counts.
        models: Traces that it may be tried on.
        clusters: Networks likewise; the case that gains most counts.
        differs: What is other here than there, and why.
        factor: Published step time of the baseline over that of the variant; None: no figure.
        authors_models: Traces that the authors have published; empty if there are none.
        authors_clusters: Networks with the constants that the authors have measured; may be empty.
    """

    system: str
    text: str
    variant: str
    baselines: tuple[str, ...]
    models: tuple[str, ...]
    clusters: tuple[Cluster, ...]
    differs: str
    factor: float | None = None
    authors_models: tuple[str, ...] = ()
    authors_clusters: tuple[Cluster, ...] = ()


_NO_MODEL = "There is no trace of this model."
_SERVERS = (
    "Its parameter servers are simulated with the bytes of a ring and two messages as startup, "
    "eight GPUs on a link. Batch sizes differ: the ratio of compute to communication is the "
    "trace's."
)
_UNITS = (
    "One operation at a time within tensors pays a startup for each tensor, as WFBP does. The "
    "traces have 32 to 199 tensors, so that startups, not order, make up most of the time that "
    "could be saved. Crossing the barrier alone gains at most 1.33x here, where forward is taken "
    "to be half of backward; in the authors' DenseNet-201 it is 2.2 times backward."
)
_P3 = "Four ranks with parameter servers at 1 to 25 Gb/s stand in for its cluster. "
_PIPELINED = (
    "Four slices in flight, whose startups overlap: its workers do not wait for an answer before "
    "they send the next slice. "
)
_ONE = "One slice at a time, as usbyte's `p3` sends them: each pays a startup. "
_LIMIT = (
    "The baseline overlaps with backward here, so that 1.33x (forward is taken to be half of "
    "backward) and startups are all that can be won; what else the measured baseline lost is not "
    "simulated. "
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
        "ByteScheduler has its best sizes here; with the traces little is left to gain. On the "
        "authors' DenseNet-201, of 604 small tensors, even its smallest credit lets a fifth of the "
        "model into flight, so that priorities are lost; an operation for each tensor is slow with "
        "either, as DDP's factor shows.", 1.26, _ZJU_JOBS, (_USBYTE_8,),
    ),
    Claim(
        "US-Byte (TPDS 2024)", "the same, over ByteScheduler's default sizes", "us-byte",
        ("bytescheduler defaults",), _ALL, _EIGHT,
        "Parts of 1 and a credit of 4 million parameters, as released: the part size that is tuned "
        "is never used there. Where a startup costs more, as on 64 x 10GbE, the factor is larger.",
        1.26, _ZJU_JOBS, (_USBYTE_8,),
    ),
    Claim(
        "US-Byte (TPDS 2024)", "up to 1.56x over WFBP, 8 nodes", "us-byte", ("wfbp",), _ALL,
        _EIGHT, _UNITS, 1.56, _ZJU_JOBS, (_USBYTE_8,),
    ),
    Claim(
        "US-Byte (TPDS 2024)", "up to 1.69x, simulated, 128 GPUs", "us-byte", ("wfbp",), _ALL,
        _RINGS_128, "Taken to be over WFBP, on rings of three speeds. " + _UNITS + " The released "
        "simulator takes elements for bytes and loses planned bytes. The authors' constants end at "
        "8 ranks and are scaled as D-Credit's code does.", 1.69, _ZJU_JOBS,
        (_scaled(_USBYTE_8, 128),),
    ),
    Claim(
        "D-Credit (TNSE 2025)", "up to 1.26x over ByteScheduler", "dcredit", ("bytescheduler",),
        _ALL, MEASURED, "A window shares one startup, as its authors count; ByteScheduler's "
        "parts, at their best sizes, pay one each. Where both overlap, nothing is left.", 1.26,
        _ZJU_JOBS, _DCREDIT,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "the same, over ByteScheduler's default sizes", "dcredit",
        ("bytescheduler defaults",), _ALL, MEASURED, "As above, with 1 and 4 million "
        "parameters.", 1.26, _ZJU_JOBS, _DCREDIT,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "up to 1.21x over DeAR", "dcredit", ("dear 25 MiB",), _ALL,
        MEASURED, "DeAR with groups of 25 MiB; it fuses across tensors, which D-Credit does not.",
        1.21, _ZJU_JOBS, _DCREDIT,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "up to 1.48x over PyTorch DDP", "dcredit", ("ddp",), _ALL,
        MEASURED, "DDP with buckets of 25 MiB.", 1.48, _ZJU_JOBS, _DCREDIT,
    ),
    Claim(
        "D-Credit (TNSE 2025)", "up to 1.53x over WFBP", "dcredit", ("wfbp",), _ALL, MEASURED,
        "A window shares one startup: what is gained is startups.", 1.53, _ZJU_JOBS, _DCREDIT,
    ),
    Claim(
        "DeAR (ICDCS 2023)", "up to 83 % over the state of the art, 64 GPUs, 10GbE", "dear",
        ("ddp", "mgwfbp", "bytescheduler"), ("bert", "resnet50"), _ETHERNET_64,
        "Over the best of DDP, MG-WFBP and ByteScheduler; 1 + forward / (2 backward) = 1.25x is "
        "its authors' limit over an ideal WFBP, and 83 % is more.", 1.83, _DEAR_JOBS,
        _ETHERNET_64,
    ),
    Claim(
        "DeAR (ICDCS 2023)", "the same, over ByteScheduler alone", "dear", ("bytescheduler",),
        ("bert", "resnet50"), _ETHERNET_64,
        "ByteScheduler does not merge tensors, and each costs 7 ms here; where several in flight "
        "start up at once, it is the faster one.", 1.83, _DEAR_JOBS, _ETHERNET_64,
    ),
    Claim(
        "DeAR (ICDCS 2023)", "up to 15 % over the state of the art, 64 GPUs, 100 Gb/s IB", "dear",
        ("ddp", "mgwfbp", "bytescheduler"), ("bert", "resnet50"), _RING_64,
        "A link for each GPU and 5 us for a message: DDP, too, hides nearly everything. The "
        "constants that the authors' code has for RDMA and 64 ranks are slower.", 1.15, _DEAR_JOBS,
        _DEAR_RDMA_64,
    ),
    Claim(
        "PipeDAP (TETC 2025)", "up to 1.82x", "pipedap", ("wfbp",), _ALL, MEASURED,
        "Taken to be over WFBP. Of its rules only the one for the next interval is simulated; the "
        "released code also counts idle time further on, and waits in forward. Its constants are "
        "not at hand; D-Credit's, of the same group, are taken. There nearly all is hidden behind "
        "the authors' long compute; only DenseNet-201 has startups to save, and this rule has one "
        "for each tensor, too.", 1.82, _ZJU_JOBS, _DCREDIT,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class EnergyClaim:
    """A published saving of energy.

    Attributes:
        variant: What is praised; see `_published_policies.VARIANTS`.
        baseline: What it is compared with.
        saving: Published share of the baseline's energy that is saved.
        factor: Published speed over the baseline.
    """

    variant: str
    baseline: str
    saving: float
    factor: float


#: D-Credit (TNSE 2025).
ENERGY_CLAIMS = (
    EnergyClaim("dcredit", "bytescheduler", 0.178, 1.26),
    EnergyClaim("dcredit", "wfbp", 0.251, 1.53),
)
#: Power of a machine that waits for the network, over its power while it computes.
WAITING_POWER = (1.0, 0.6, 0.3)
#: The jobs and networks of the claims on D-Credit's speed.
ENERGY_MODELS, ENERGY_CLUSTERS = _ZJU_JOBS, _DCREDIT

#: Published, and not what a simulator of a step's time can tell.
NOT_SIMULATED = (
    ("DCT (Gupta et al., 2020)", "100x less communication with data parallelism, 20x with hybrid; "
     "37 % less time for a recommender",
     "The bytes that pass a threshold depend on gradients and activations of a recommender that "
     "is not public. Codec `dct` has its threshold on gradients; activations are not usbyte's."),
    ("FusionLLM (Tang et al., 2024)", "AdaTopK: 1.45x to 9.39x",
     "Activations between pipeline stages of hosts far apart. usbyte synchronises gradients; it "
     "has the rule that compresses the slowest links most (`adatopk`), not the pipeline."),
    ("DASO (Coquelin et al., 2021)", "up to 34 % less time",
     "It is what training without most of the exchanges between nodes takes, beside a system whose "
     "own overhead is in it; docs/daso.md measures usbyte's and names the differences."),
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
