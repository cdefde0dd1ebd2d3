# SPDX-License-Identifier: Apache-2.0
"""Four models whose shapes data-parallel systems are usually compared on, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VGG16(nn.Module):
    """Thirteen convolutions and three dense layers.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    2015; configuration D.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width, depth in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.convolutions = nn.Sequential(*layers)
        self.dense = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (batch, 3, 224, 224) to logits (batch, 1000)."""
        logits: Tensor = self.dense(self.convolutions(x).flatten(1))
        return logits


class Bottleneck(nn.Module):
    """Three convolutions around which the input is added; the second one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow = _normalised(inputs, width, 1)
        self.middle = _normalised(width, width, 3, stride)
        self.widen = _normalised(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _normalised(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, inputs, side, side) to (batch, 4 width, side / stride, side / stride)."""
        y = F.relu(self.middle(F.relu(self.narrow(x))))
        return F.relu(self.widen(y) + self.shortcut(x))


def _normalised(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class ResNet50(nn.Module):
    """Sixteen bottlenecks.

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2016.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _normalised(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for width, depth, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
            for k in range(depth):
                blocks.append(Bottleneck(inputs, width, stride if k == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (batch, 3, 224, 224) to logits (batch, 1000)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Self-attention of twelve heads; queries, keys and values from one dense layer or from three.

    Vaswani et al., "Attention Is All You Need", 2017.
    """

    def __init__(self, width: int, causal: bool, projections: int) -> None:
        super().__init__()
        self.causal = causal
        self.inputs = nn.ModuleList(
            nn.Linear(width, 3 * width // projections) for _ in range(projections)
        )
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        split = torch.cat([layer(x) for layer in self.inputs], -1).chunk(3, -1)
        query, key, value = (t.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for t in split)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


_HEADS = 12
_LAYERS = 12
_WIDTH = 768


class Block(nn.Module):
    """Attention and a feed-forward network; normalised before each (GPT-2) or after (BERT)."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.before = causal
        self.norm1 = nn.LayerNorm(_WIDTH)
        self.attention = Attention(_WIDTH, causal, 1 if causal else 3)
        self.norm2 = nn.LayerNorm(_WIDTH)
        self.widen = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.narrow = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self._feed(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        after: Tensor = self.norm2(x + self._feed(x))
        return after

    def _feed(self, x: Tensor) -> Tensor:
        fed: Tensor = self.narrow(F.gelu(self.widen(x)))
        return fed


class GPT2(nn.Module):
    """The smallest GPT-2, whose head is the token embedding.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50257, _WIDTH)
        self.positions = nn.Embedding(1024, _WIDTH)
        self.blocks = nn.Sequential(*(Block(causal=True) for _ in range(_LAYERS)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 50257, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        """Maps tokens (batch, time), int64, to logits (batch, vocabulary, time)."""
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)


class BertBase(nn.Module):
    """BERT-base, uncased, with the masked-word head, whose last layer is the token embedding.

    Without pooler and next-sentence head. Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of
    Deep Bidirectional Transformers for Language Understanding", 2019.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30522, _WIDTH)
        self.positions = nn.Embedding(512, _WIDTH)
        self.segments = nn.Embedding(2, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.blocks = nn.Sequential(*(Block(causal=False) for _ in range(_LAYERS)))
        self.transform = nn.Linear(_WIDTH, _WIDTH)
        self.transform_norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 30522)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        """Maps tokens (batch, time), int64, to logits (batch, vocabulary, time)."""
        place = torch.arange(text.shape[1], device=text.device)
        x = self.tokens(text) + self.positions(place) + self.segments(torch.zeros_like(place))
        x = self.transform_norm(F.gelu(self.transform(self.blocks(self.norm(x)))))
        logits: Tensor = self.head(x)
        return logits.transpose(1, 2)


@dataclass(frozen=True)
class Job:
    """What is recorded.

    Attributes:
        model: Its class.
        optimizer: As usual for the model.
        batch: Samples of a step.
        tokens: Of a sample; 0 for images of 224 x 224.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: int
    tokens: int = 0

    def sample(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        if not self.tokens:
            return torch.randn(self.batch, 3, 224, 224), torch.randint(1000, (self.batch,))
        vocabulary = model.get_parameter("tokens.weight").shape[0]
        inputs, targets = torch.randint(vocabulary, (2, self.batch, self.tokens))
        return inputs, targets


_SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
_ADAMW = partial(torch.optim.AdamW, lr=1e-4)

JOBS = {
    "vgg16": Job(VGG16, _SGD, 4),
    "resnet50": Job(ResNet50, _SGD, 8),
    "bert-base": Job(BertBase, _ADAMW, 4, 128),
    "gpt2": Job(GPT2, _ADAMW, 1, 512),
}
