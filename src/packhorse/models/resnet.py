"""Pre-activation residual nets of any depth: every convolution follows a batch norm and a relu, and the sum of a block is left alone.

B batch, C channels. The depth counts convolutions (and the linear head), as the papers do.
Source: He et al. 2016, arXiv:1603.05027 (figure 4 (e)); stages of He et al. 2015, arXiv:1512.03385, table 1 and section 4.2.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.errors import UserError

IMAGENET_STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
EXPANSION = 4  # a bottleneck's output is this much wider than its middle


class Layer(nn.Module):
    """x (B, C, height, width) -> batch norm, relu, convolution. As a layer of its own, so that a plan can name it."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.norm(x), inplace=True))


class Block(nn.Module):
    """x -> x + f(x). Basic: f is two 3x3 layers; bottleneck: 1x1, 3x3, 1x1 with `EXPANSION` times wider ends.

    Where the shape changes, x is projected by a 1x1 convolution instead of passed through.
    """

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = width * EXPANSION if bottleneck else width
        if bottleneck:
            layers = [Layer(channels, width, 1), Layer(width, width, 3, stride), Layer(width, out, 1)]
        else:
            layers = [Layer(channels, width, 3, stride), Layer(width, out, 3)]
        self.layers = nn.Sequential(*layers)
        self.project = nn.Conv2d(channels, out, 1, stride, bias=False) if channels != out or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + (x if self.project is None else self.project(x))


class ResNet(nn.Module):
    """images (B, 3, height, width), labels (B,), int64 in [0, classes)  ->  mean cross entropy in nats an image, a scalar.

    `stages`: blocks of each stage; the width doubles and the sides halve from one to the next. `large`: the stem of ImageNet's nets, a 7x7
    convolution and a pooling that quarter the sides; otherwise one 3x3 convolution. Convolutions start as in He et al. 2015,
    arXiv:1502.01852, equation 10.
    """

    def __init__(self, stages: Sequence[int], *, width: int, classes: int, bottleneck: bool, large: bool) -> None:
        super().__init__()
        self.stem: nn.Module
        if large:
            self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.MaxPool2d(3, 2, padding=1))
        else:
            self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        blocks, channels = [], width
        for stage, count in enumerate(stages):
            for place in range(count):
                blocks.append(Block(channels, width * 2**stage, 2 if stage and not place else 1, bottleneck))
                channels = width * 2**stage * (EXPANSION if bottleneck else 1)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(images))), inplace=True)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet(
    depth: int, *, images: Literal["cifar", "imagenet"] = "cifar", classes: int | None = None, width: int | None = None, bottleneck: bool = False
) -> ResNet:
    """The net of `depth` layers that the papers name so.

    images="cifar": three stages of n blocks, 10 classes, 16 channels at first; depth 6n + 2, or 9n + 2 with bottleneck=True (164, 1001).
    images="imagenet": four stages as in table 1, 1000 classes, 64 channels; depth 18, 34 (basic), 50, 101, 152, 200 (bottleneck).

    Raises UserError with the nearest depths if there is no such net.
    """
    if images == "imagenet":
        if depth not in IMAGENET_STAGES:
            raise UserError(f"resnet({depth}, images='imagenet'): no such net; expected one of {', '.join(map(str, IMAGENET_STAGES))}")
        return ResNet(IMAGENET_STAGES[depth], width=width or 64, classes=classes or 1000, bottleneck=depth >= 50, large=True)
    layers = 9 if bottleneck else 6
    blocks, rest = divmod(depth - 2, layers)
    if blocks < 1 or rest:
        below = max(blocks, 1) * layers + 2
        raise UserError(
            f"resnet({depth}, bottleneck={bottleneck}): the depth of three equal stages is {layers} n + 2; expected {below} or {below + layers}, "
            "for example"
        )
    return ResNet((blocks,) * 3, width=width or 16, classes=classes or 10, bottleneck=bottleneck, large=False)


def equal_stages(depth: int, *, classes: int = 1000, width: int = 64) -> ResNet:
    """Four stages of depth / 4 conv-bn-relu layers each, two a block: the net over whose depth (128 .. 1024) Chen et al. 2016 measure memory.

    Images of ImageNet's size; the stem and the head are not counted. Raises UserError unless depth is a multiple of 8.
    Source: arXiv:1604.06174, section 5.2.
    """
    if depth < 8 or depth % 8:
        raise UserError(f"equal_stages({depth}): four stages of whole blocks of two layers need a multiple of 8; expected {max(depth // 8, 1) * 8}")
    return ResNet((depth // 8,) * 4, width=width, classes=classes, bottleneck=False, large=True)
