# SPDX-License-Identifier: Apache-2.0
"""What the page about Themis says between its tables."""

HEAD = """# Themis' published figures, reproduced by simulation

Written by `{command}`: usbyte {version}, Python {python}, {date}. Nothing was sent. Themis \
(Rashidi, Won, Srinivasan, Sridharan and Krishna, ISCA 2022, arXiv 2110.04478) cuts a collective \
into {chunks} chunks and lets each go through the dimensions of a network in an order of its own; \
*fixed* is innermost first for all of them, *themis+fifo* serves chunks in a dimension as they \
come, *themis+scf* the smallest first. Networks are the six of 1,024 ranks that it was simulated \
on; [where they are from](../python/usbyte/planning/meshes/README.md), and that latencies of a \
step (20, 700 and 1,700 ns) are assumed, is told there.

Utilisation is what all dimensions moved over what they could have moved until the end, as Themis \
defines it: speeds weigh dimensions. Every route moves the same bytes, so that it is the ideal \
time over the time.

## One all_reduce

On average over the six networks and 100, 250, 500 and 1000 MB; published are averages over its \
networks and sizes from 100 MB to 1 GB, and single figures by network could not be looked up. \
What is published is only reached where several chunks are under way in a dimension, so that \
startups overlap, which is taken to be how it was simulated; *in turn*, a dimension carries out \
one operation at a time, startup included, as one communicator does. Themis counts startups once \
in each dimension's load where they overlap, else with each phase.

"""

LATENCY = """
## Startups in loads

What Themis' loads count of startups: `once` in each dimension, with `each_phase`, or nothing \
(`original`), which is what its released code does. Means as above. *Least* is the smallest gain \
of either queue: below 1 the greedy rule loses. *Chosen* is the mean gain if the simulator \
decides between fixed and the two; it never loses, and keeps to fixed in so many of 24 cases.

"""

CHUNKS_TEXT = """
Where startups take their turn, fewer and larger chunks can be better. Utilisation, % (mean of \
the 24 cases, `each_phase`):

"""

CLOSED_FORM = """
## Two dimensions: when there is nothing to gain

Nodes of 8 ranks, 1 GB, no startups. With a = (P - 1) / P, inner first alone is best unless B1/B2 \
< (P1 - 1) P2 / (P2 - 1), since else the outer dimension is the busier one whatever the order; \
*inner first* and *gain* are the best share of bytes by the closed form and what it gains over \
all of them. Then Themis in the better of its queues with 4, 16 and 64 chunks, simulated, over \
the fixed order: near the bound it can lose. *Chosen* does not. Beyond the \
bound Themis itself finds the inner dimension the less loaded one every time, and stays with the \
fixed order.

"""

TRAINING = """
## Training

Speed-up of an iteration over the fixed order: mean of the six networks, and the largest in \
parentheses. The paper's first version (2021) has ResNet-50, the later one ResNet-152; means of \
an ideal network at ISCA are from a reader's summary of the paper. Ours are of [these \
jobs](../python/usbyte/planning/workloads/README.md), with startups overlapping; the last two \
columns tell by which factor computing would have to change for the published mean to come out, \
*none* where no factor does.

*Ideal* of ours (`ideal_step_s`): a collective uses all links of the dimensions that it spans all \
the time, without startups; those among the same ranks are served one after another, those among \
others are not in each other's way. No schedule is faster for these jobs, which have no two among \
the same ranks under way at once. It is no bound for other jobs, whose small collectives may \
overtake large ones.

"""

RUN_TIME = """
## Run time

`chosen_routes` for 1 GB: routes and three simulations. All ranks do the same, so that the cost \
does not depend on their number.

"""

DEVIATIONS = """
## What differs, and why

- Utilisation of the fixed order, of order of arrival and of smallest first differ by \
{fixed:+.1f}, {fifo:+.1f} and {scf:+.1f} points from what is published, the gain of smallest \
first by {gain:+.1%}. Order of arrival depends on which of two chunks that come at nearly the \
same time is first, as the jumps from one size to the next show.
- Startups decide. Were they carried out in turn, the published utilisation could not be reached \
with 64 chunks by any rule here; without any startups order of arrival is as published, and \
smallest first above it.
- The largest gain is that of the network of three equal dimensions, whose fixed order leaves two \
of them nearly idle. Whether the published latencies are these is not known here.
- Counting no startups in loads, as the released code does, is as good as counting them once; \
where they take their turn, counting them with each phase is better.
- ResNet-50: the public input is of one image for each NPU. With 32 images the gain is \
{images:.2f}x: computing hides what could be gained. That the published gain is larger than \
either says that computing there was shorter, or more was sent.
- GNMT: no public input was found. Its gradients follow from the published layers, its computing \
is derived, and with it the published gain does not come out; it would with about a fifth to a \
third of that computing.
- DLRM: its all_to_alls go one dimension after the other in the fixed order under every scheme, \
and wait behind nothing: gradients are sent last. Around a ring of P ranks messages are passed on \
from one to the next, so that a rank sends (P - 1) / 2 times its vector there and not (P - 1) / P, \
which is all that *ideal* counts. ASTRA-sim has both: the former with `ring`, the latter with \
`direct`, where what is passed on takes latency but no bandwidth, and which public settings for \
`3d-fc-ring-sw` choose; what was published is likely to be the latter. With it, the gains by \
arrival and of smallest first would be {fifo_direct:.2f}x and {scf_direct:.2f}x on average in \
place of {fifo_ring:.2f}x and {scf_ring:.2f}x.
- Transformer-1T: two layers in place of all of them. Where 128 ranks are no whole dimensions \
(the network of two), the outer one is shared.
- In every job gradients travel in one all_reduce after backward, as the public inputs have it: \
overlap with backward would leave less to gain.
- Links have no contention but within their dimension, and adding up takes no time.
"""
