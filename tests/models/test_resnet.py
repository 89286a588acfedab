import pytest
import torch
from torch.nn import functional as F

from against_plain import assert_steps_equal
from packhorse.errors import UserError
from packhorse.models.resnet import IMAGENET_STAGES, Block, ResNet, equal_stages, resnet

pytestmark = pytest.mark.cpu


def count(model):
    return sum(p.numel() for p in model.parameters())


def convolutions(model, kernel=None):
    found = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Conv2d) and "project" not in name]
    return len([m for m in found if kernel is None or m.kernel_size == (kernel, kernel)])


def batch(classes=5, side=8):
    g = torch.Generator().manual_seed(0)
    return {"images": torch.randn(4, 3, side, side, generator=g), "labels": torch.randint(classes, (4,), generator=g)}


@pytest.mark.parametrize("bottleneck,large", [(False, False), (True, False), (False, True)])
def test_three_steps_equal_plain_pytorch(bottleneck, large):
    torch.manual_seed(0)
    model = ResNet((1, 1, 1), width=4, classes=5, bottleneck=bottleneck, large=large).train()
    assert_steps_equal(model, batch(side=16 if large else 8))
    assert {int(n) for name, n in model.named_buffers() if name.endswith("num_batches_tracked")} == {3}  # statistics moved once a step


@pytest.mark.parametrize("depth,bottleneck", [(20, False), (110, False), (164, True)])
def test_a_cifar_net_has_its_depth_and_parameters(depth, bottleneck):
    with torch.device("meta"):
        model = resnet(depth, bottleneck=bottleneck)
    assert convolutions(model) + 1 == depth
    n, e = (depth - 2) // (9 if bottleneck else 6), 4 if bottleneck else 1
    total, inside = 3 * 16 * 9, 16
    for w in (16, 32, 64):
        for _ in range(n):
            shapes = [(inside, w, 1), (w, w, 3), (w, w * e, 1)] if bottleneck else [(inside, w, 3), (w, w, 3)]
            total += sum(a * b * k * k + 2 * a for a, b, k in shapes)  # a convolution, and scale and shift of the norm before it
            total += inside * w * e if inside != w * e else 0
            inside = w * e
    assert count(model) == total + 2 * inside + inside * 10 + 10


# He et al. 2016: 1.7 million parameters for depth 110 and 164, 10.2 for 1001 (tables 1 and 4)
@pytest.mark.parametrize("depth,bottleneck,millions", [(110, False, 1.7), (164, True, 1.7), (1001, True, 10.2)])
def test_published_numbers_of_parameters(depth, bottleneck, millions):
    with torch.device("meta"):
        assert round(count(resnet(depth, bottleneck=bottleneck)) / 1e6, 1) == pytest.approx(millions, abs=0.11)


@pytest.mark.parametrize("depth", [18, 50, 152])
def test_an_imagenet_net_has_its_depth(depth):
    with torch.device("meta"):
        model = resnet(depth, images="imagenet")
    assert convolutions(model) + 1 == depth
    assert convolutions(model, 7) == 1 and model.head.in_features == (2048 if depth >= 50 else 512)


def test_resnet_50_has_the_published_number_of_parameters():
    """25,557,032 of the original; before its additions, not after, norms are as wide as a block's input: the difference in closed form."""
    with torch.device("meta"):
        model = resnet(50, images="imagenet")
    original, ours = 2 * 64, 0  # the norm of the stem
    inside = 64
    for w, blocks in zip((64, 128, 256, 512), IMAGENET_STAGES[50]):
        for place in range(blocks):
            original += 2 * (w + w + 4 * w) + (2 * 4 * w if place == 0 else 0)  # the projection has a norm of its own there
            ours += 2 * (inside + w + w)
            inside = 4 * w
    assert count(model) - 25_557_032 == ours + 2 * 2048 - original


@pytest.mark.parametrize("depth", [128, 256, 1024])
def test_equal_stages_are_equal_and_as_deep_as_asked(depth):
    with torch.device("meta"):
        model = equal_stages(depth)
    assert convolutions(model, 3) == depth
    widths = [block.layers[-1].conv.out_channels for block in model.blocks]
    assert [widths.count(w) for w in (64, 128, 256, 512)] == [depth // 8] * 4


def test_a_block_equals_the_formula():
    torch.manual_seed(0)
    block = Block(4, 8, 2, bottleneck=False).double().train()
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)

    def bn(x):
        return (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()

    one, two = block.layers
    inner = F.conv2d(bn(x).relu(), one.conv.weight, stride=2, padding=1)
    expected = F.conv2d(bn(inner).relu(), two.conv.weight, padding=1) + F.conv2d(x, block.project.weight, stride=2)
    before = x.clone()
    assert torch.allclose(block(x), expected, atol=1e-12)
    assert torch.equal(x, before)


def test_a_depth_that_is_none_names_the_nearest():
    with pytest.raises(UserError, match="6 n \\+ 2; expected 20 or 26"):
        resnet(21)
    with pytest.raises(UserError, match="one of 18, 34, 50, 101, 152, 200"):
        resnet(51, images="imagenet")
    with pytest.raises(UserError, match="multiple of 8; expected 128"):
        equal_stages(130)


def test_sides_halve_from_stage_to_stage():
    """Table 1 of He et al. 2015 ends at 7x7 for images of 224x224, section 4.2 at 8x8 for 32x32."""
    with torch.device("meta"):
        for model, side, expected in [
            (resnet(50, images="imagenet"), 224, (1, 2048, 7, 7)),
            (equal_stages(16), 224, (1, 512, 7, 7)),
            (resnet(20), 32, (1, 64, 8, 8)),
        ]:
            assert model.blocks(model.stem(torch.zeros(1, 3, side, side))).shape == expected
