"""Models of many architectures, tiny ones and the real ones of the papers, each with data that it can train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import egeria_lab as lab
from egeria_lab.data.datasets import ArrayDataset


def conv(into: int, out: int, size: int = 3, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Sequential:
    pad = dilation * (size // 2)
    return nn.Sequential(
        nn.Conv2d(into, out, size, stride, pad, groups=groups, dilation=dilation, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
    )


class Vgg(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        sizes = [3, width, width, "pool", 2 * width, 2 * width, "pool", 4 * width]
        parts: list[nn.Module] = []
        into = 3
        for size in sizes[1:]:
            parts.append(nn.MaxPool2d(2) if size == "pool" else conv(into, int(size)))
            into = into if size == "pool" else int(size)
        self.features = nn.Sequential(*parts)
        self.classifier = nn.Sequential(nn.Linear(into * 4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(F.adaptive_avg_pool2d(self.features(x), 2).flatten(1))
        return out


class InvertedResidual(nn.Module):
    def __init__(self, into: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = into * expand
        self.expand = conv(into, hidden, 1) if expand > 1 else nn.Identity()
        self.depthwise = conv(hidden, hidden, 3, stride, groups=hidden)
        self.project = nn.Sequential(nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out))
        self.adds = stride == 1 and into == out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + out if self.adds else out


MOBILENET_V2 = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


class MobileNetV2(nn.Module):
    """Sandler et al. 2018; `plan` has rows of (expansion, channels, repeats, stride)."""

    def __init__(self, plan: Any, stem: int, last: int, classes: int = 4) -> None:
        super().__init__()
        self.stem = conv(3, stem, 3, 2)
        blocks: list[nn.Module] = []
        into = stem
        for expand, out, repeats, stride in plan:
            for number in range(repeats):
                blocks.append(InvertedResidual(into, out, stride if number == 0 else 1, expand))
                into = out
        self.blocks = nn.Sequential(*blocks)
        self.head = conv(into, last, 1)
        self.classifier = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.head(self.blocks(self.stem(x))).mean((2, 3)))
        return out


class UNet(nn.Module):
    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2 = conv(3, width), conv(width, 2 * width)
        self.bottom = conv(2 * width, 4 * width)
        self.up2, self.join2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), conv(4 * width, 2 * width)
        self.up1, self.join1 = nn.ConvTranspose2d(2 * width, width, 2, 2), conv(2 * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        deep = self.bottom(F.max_pool2d(second, 2))
        deep = self.join2(torch.cat([self.up2(deep), second], 1))
        out: Tensor = self.out(self.join1(torch.cat([self.up1(deep), first], 1)))
        return out


class Bottleneck(nn.Module):
    def __init__(self, into: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        out = 4 * width
        self.reduce, self.middle = conv(into, width, 1), conv(width, width, 3, stride, dilation=dilation)
        self.expand = nn.Sequential(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out))
        fits = stride == 1 and into == out
        self.shortcut = nn.Identity() if fits else nn.Sequential(
            nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.expand(self.middle(self.reduce(x))) + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al. 2016; ``dilated`` keeps the last two stages at stride 1, as DeepLabv3 wants them."""

    def __init__(
        self, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 4, dilated: bool = False
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        stages, into = [], width
        for number, count in enumerate(blocks):
            held = dilated and number >= 2
            stride, dilation = (1 if held or number == 0 else 2), (2 ** (number - 1) if held else 1)
            inner = width * 2**number
            stages.append(nn.Sequential(*(
                Bottleneck(into if i == 0 else 4 * inner, inner, stride if i == 0 else 1, dilation)
                for i in range(count)
            )))  # fmt: skip
            into = 4 * inner
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(into, classes)
        self.channels = into

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.stages(self.stem(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.features(x).mean((2, 3)))
        return out


class DeepLabV3(nn.Module):
    """Chen et al. 2017: a dilated ResNet, pooling, scores at full size; the backbone's classifier is unused."""

    def __init__(self, width: int, blocks: tuple[int, ...], inner: int, classes: int = 3) -> None:
        super().__init__()
        self.backbone = ResNet50(width, blocks, dilated=True)
        channels = self.backbone.channels
        self.branches = nn.ModuleList(
            [conv(channels, inner, 1), *(conv(channels, inner, 3, dilation=rate) for rate in (2, 4, 6))]
        )
        self.pooled = nn.Conv2d(channels, inner, 1)
        self.project = conv(5 * inner, inner, 1)
        self.classifier = nn.Sequential(conv(inner, inner), nn.Conv2d(inner, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        deep = self.backbone.features(x)
        whole = self.pooled(deep.mean((2, 3), keepdim=True)).relu().expand(-1, -1, *deep.shape[2:])
        joined = self.project(torch.cat([*(branch(deep) for branch in self.branches), whole], 1))
        return F.interpolate(self.classifier(joined), size=x.shape[2:], mode="bilinear")


class Seq2Seq(nn.Module):
    """Encoder-decoder Transformer (Vaswani et al. 2017) with learned positions."""

    def __init__(
        self, dim: int, heads: int, depth: int, feedforward: int, vocabulary: int = 13, length: int = 8
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, dim)
        self.target = nn.Embedding(vocabulary, dim)
        self.places = nn.Parameter(torch.randn(length, dim) * 0.02)
        options: dict[str, Any] = {"dropout": 0.1, "batch_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, feedforward, **options) for _ in range(depth)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(dim, heads, feedforward, **options) for _ in range(depth)
        )
        self.scores = nn.Linear(dim, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.source(source) + self.places[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x)
        y = self.target(target) + self.places[: target.shape[1]]
        mask = torch.full((target.shape[1],) * 2, float("-inf"), device=y.device).triu(1)
        for layer in self.decoder:
            y = layer(y, x, tgt_mask=mask)
        out: Tensor = self.scores(y)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(x))
        out: Tensor = self.head(states[:, -1])
        return out


class Tied(nn.Module):
    """A decoder language model whose scores use the embedding's weights again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.scores = nn.Linear(16, 13, bias=False)
        self.scores.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scores(self.encoder(self.embed(x)))
        return out


class TwoBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(conv(3, 4), conv(4, 4))
        self.right = nn.Sequential(conv(3, 6, 5), conv(6, 4))
        self.joint = conv(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x.flip(3))], 1)
        out: Tensor = self.head(self.joint(both).mean((2, 3)))
        return out


@dataclass
class Answer:
    """What a model may answer instead of a tensor."""

    scores: Tensor
    hidden: Tensor


class Odd(nn.Module):
    """A module that runs twice, one that never runs, one that runs in training only, and a record as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.unused, self.sometimes = nn.Linear(3, 3), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Answer:
        x = F.relu(self.first(x.flatten(1)[:, :12]))
        x = F.relu(self.shared(F.relu(self.shared(x))))
        if self.training:
            x = x + 0.1 * self.sometimes(x)
        return Answer(self.last(x), x)


class Rows(Dataset[dict[str, Tensor]]):
    """Samples that are dictionaries."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        build: makes the model; twice the same weights.
        data: makes its training set.
        least: layer modules that must be found.
        empty: column → words of the sentence that says why the cell is empty.
        options: of the session, such as `forward`.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], Any]
    least: int
    empty: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def made(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build()


COUNT = 24


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(size: int = 16, classes: int = 4) -> ArrayDataset:
    g = generator()
    return ArrayDataset(
        torch.randn(COUNT, 3, size, size, generator=g), torch.randint(0, classes, (COUNT,), generator=g)
    )


def scenes(size: int = 16) -> ArrayDataset:
    g = generator()
    labels = torch.randint(0, 3, (COUNT, size, size), generator=g)
    return ArrayDataset(torch.randn(COUNT, 3, size, size, generator=g), labels)


def tokens(length: int = 6) -> ArrayDataset:
    g = generator()
    return ArrayDataset(torch.randint(0, 13, (COUNT, length), generator=g), torch.randint(0, 4, (COUNT,), generator=g))


def language(length: int = 6) -> ArrayDataset:
    text = torch.randint(0, 13, (COUNT, length + 1), generator=generator())
    return ArrayDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def pairs() -> Rows:
    g = generator()
    return Rows(
        source=torch.randint(0, 13, (COUNT, 6), generator=g), target=torch.randint(0, 13, (COUNT, 5), generator=g)
    )


def words(length: int = 6) -> Rows:
    g = generator()
    ids = torch.randint(0, 13, (COUNT, length), generator=g)
    labels = torch.randint(0, 4, (COUNT,), generator=g)
    return Rows(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)


def translated(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    return model(batch["source"], batch["target"][:, :-1]), batch["target"][:, 1:]


def classified(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]


def continued(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    return model(input_ids=batch[0], use_cache=False).logits, batch[1]


def seen(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    return model(pixel_values=batch[0]).logits, batch[1]


def answered(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    return model(batch[0]).scores, batch[1]


def own(name: str, shape: tuple[int, ...], classes: int = 4, **options: Any) -> Callable[[], nn.Module]:
    return lambda: lab.models.build(name, input_shape=shape, num_classes=classes, seed=1, **options)


def hugging_face(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config_kind, model_kind = {
            "bert": ("BertConfig", "BertForSequenceClassification"),
            "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
            "vit": ("ViTConfig", "ViTForImageClassification"),
        }[kind]
        config = getattr(transformers, config_kind)(**options)
        model: nn.Module = getattr(transformers, model_kind)(config)
        return model

    return build


TINY_BERT = {
    "vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 8, "num_labels": 4,
}  # fmt: skip

TINY: dict[str, Row] = {
    "MLP": Row(own("mlp", (3, 16, 16), hidden=(16, 16)), images, 3),
    "ResNet-20": Row(own("resnet20", (3, 16, 16), width=4), images, 10),
    "VGG-like": Row(Vgg, images, 7),
    "MobileNetV2-like": Row(lambda: MobileNetV2([(1, 4, 1, 1), (3, 6, 2, 2), (3, 8, 2, 2)], 4, 16), images, 7),
    "U-Net-like": Row(UNet, scenes, 3),
    "DeepLab-like": Row(lambda: DeepLabV3(2, (1, 1, 1, 1), 4), scenes, 5),
    "encoder-decoder": Row(lambda: Seq2Seq(16, 2, 2, 32), pairs, 5, options={"forward": translated}),
    "decoder LM": Row(
        own("transformer", (6,), classes=13, dim=16, depth=2, heads=2, vocabulary=13, head="tokens"), language, 4
    ),
    "ViT-like": Row(own("transformer", (3, 16, 16), dim=16, depth=2, heads=2, patch=4), images, 4),
    "Hugging Face BERT": Row(hugging_face("bert", **TINY_BERT), words, 4, options={"forward": classified}),
    "Hugging Face GPT-2": Row(
        hugging_face("gpt2", vocab_size=13, bos_token_id=0, eos_token_id=0, n_embd=16, n_layer=2, n_head=2,
                     n_positions=8),
        language, 3,
        {
            "sparse": "no weight of this model would be sparse",
            "cache": "still depends on trainable parameters (transformer",
        },
        {"forward": continued},
    ),
    "Hugging Face ViT": Row(
        hugging_face("vit", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                     image_size=16, patch_size=4, num_labels=4),
        images, 4, options={"forward": seen},
    ),
    "RNN": Row(Recurrent, tokens, 3, {"sparse": "no weight of this model would be sparse"}),
    "tied weights": Row(Tied, language, 3, {"cache": "still depends on trainable parameters (embed.weight)"}),
    "two branches": Row(TwoBranch, images, 3),
    "runs twice, record out": Row(Odd, images, 2, options={"forward": answered}),
}  # fmt: skip
"""Tiny widths: every column."""

REAL: dict[str, Row] = {
    "ResNet-50": Row(ResNet50, lambda: images(32), 17),
    "MobileNetV2": Row(lambda: MobileNetV2(MOBILENET_V2, 32, 1280), lambda: images(32), 19),
    "DeepLabv3": Row(lambda: DeepLabV3(64, (3, 4, 6, 3), 256), lambda: scenes(32), 18),
    "ResNet-56": Row(own("resnet56", (3, 16, 16)), images, 28),
    "ResNet-32": Row(own("resnet32", (3, 16, 16)), images, 16),
    "Transformer-Tiny": Row(lambda: Seq2Seq(128, 4, 4, 512), pairs, 7, options={"forward": translated}),
    "Transformer-Base": Row(lambda: Seq2Seq(512, 8, 6, 2048), pairs, 9, options={"forward": translated}),
    "BERT-Base": Row(hugging_face("bert", vocab_size=13, num_labels=4), words, 14, options={"forward": classified}),
}
"""The architectures of the papers at their real widths, on small inputs: found, frozen, counted."""
