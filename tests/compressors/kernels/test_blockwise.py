"""What blocks of int8 and int4 lose, against float64, and that their forms agree."""

import itertools
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from forms import checked_multiples, in_form, needs_cuda, needs_triton, run_interpreted
from torch import Tensor

from lightning_commopt.compressors.kernels import blockwise, blockwise_format
from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat, Undo
from support.cross_section import sampled

LEVELS = {8: np.arange(-127.0, 128.0), 4: np.array([k * (abs(k) + 4.0) for k in range(-8, 8)])}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# One element, less than a block, whole blocks, a last block that is not full; the smallest and largest blocks.
SIZES = [
    (1, BlockFormat(8, 16), torch.float32),
    (15, BlockFormat(8, 16), torch.float16),
    (64, BlockFormat(8, 64), torch.float32),
    (1000, BlockFormat(8, 128), torch.float32),
    (1000, BlockFormat(8, 32), torch.bfloat16),
    (4099, BlockFormat(8, 64), torch.float64),
    (4099, BlockFormat(8, 256), torch.float32),
    (1, BlockFormat(4, 32), torch.float32),
    (4099, BlockFormat(4, 32), torch.float32),
    (1000, BlockFormat(4, 64), torch.bfloat16),
    (4099, BlockFormat(4, 256), torch.float64),
]
BOTH = pytest.mark.parametrize("block_format", [BlockFormat(8, 64), BlockFormat(4, 32)])


@pytest.fixture(autouse=True, params=["torch", "c"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything holds for both forms on CPU."""
    with in_form(request.param, "encode", "decode"):
        yield request.param


def gradients(numel: int, world_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world_size)]


def empty_message(numel: int, world_size: int, block_format: BlockFormat, device: str = "cpu") -> Tensor:
    width = block_format.shard_bytes(numel, world_size)
    return torch.full((world_size, width), 0xAB, dtype=torch.uint8, device=device)


def shard_of(residual: Tensor, rank: int, world_size: int, block_format: BlockFormat) -> Tensor:
    size = block_format.shard_numel(residual.numel(), world_size)
    return residual[rank * size : (rank + 1) * size]


def decoded(message: Tensor, block_format: BlockFormat) -> np.ndarray:
    """What a message stands for, in float64, with what fills it up."""
    parts = block_format.split(message)
    codes = parts.codes.numpy().astype(np.int64)
    if block_format.bits == 4:
        codes = np.concatenate([(codes + 8) % 16 - 8, codes >> 4], axis=-1)
        codes *= np.abs(codes) + 4
    return (codes * parts.scales.double().numpy()[..., None]).ravel()


def scale_of_each(message: Tensor, block_format: BlockFormat) -> np.ndarray:
    return block_format.split(message).scales.double().numpy().ravel().repeat(block_format.block_size)


def rounding_error(c: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """What the nearest level leaves out of each element."""
    return np.abs(c[:, None] - LEVELS[bits] * scale[:, None]).min(1)


def padded(flat: Tensor, message: Tensor, block_format: BlockFormat) -> np.ndarray:
    whole = np.zeros(block_format.split(message).scales.numel() * block_format.block_size)
    whole[: flat.numel()] = flat.double().numpy()
    return whole


class Step:
    """One average among ranks in this process; the collectives are done by hand."""

    def __init__(self, flats: list[Tensor], residuals: list[Tensor] | None, block_format: BlockFormat) -> None:
        self.flats, self.residuals, self.block_format = flats, residuals, block_format
        self.world_size, numel, device = len(flats), flats[0].numel(), flats[0].device.type
        self.sent = [empty_message(numel, self.world_size, block_format, device) for _ in flats]
        for rank, flat in enumerate(flats):
            blockwise.encode(flat, residuals[rank] if residuals else None, self.sent[rank], block_format)
        self.encoded_residuals = [residual.clone() for residual in residuals or []]
        self.received = [torch.stack([row[rank] for row in self.sent]) for rank in range(self.world_size)]
        self.gathered = empty_message(numel, self.world_size, block_format, device)
        self.shard_means = torch.full((self.world_size, block_format.shard_numel(numel, self.world_size)), 7.0).to(
            device
        )
        for rank, received in enumerate(self.received):
            blockwise.average(received, self.shard_means[rank], block_format)
            blockwise.reduce(received, self.gathered[rank], self.shard(rank), block_format)
        self.mean = torch.full_like(flats[0], 7)
        blockwise.decode(self.gathered, self.mean, block_format)
        self.finite = blockwise.is_finite(self.gathered, block_format)

    def shard(self, rank: int) -> Tensor | None:
        return shard_of(self.residuals[rank], rank, self.world_size, self.block_format) if self.residuals else None

    def undo(self, finite: Tensor) -> None:
        assert self.residuals
        for rank, (flat, residual) in enumerate(zip(self.flats, self.residuals, strict=True)):
            undo = Undo(self.sent[rank], self.received[rank], self.gathered[rank], residual, rank, finite)
            blockwise.decode(self.gathered, flat.clone(), self.block_format, undo)


@pytest.mark.parametrize(
    ("form", "numel", "block_format", "dtype"),
    [("torch", *size) for size in SIZES] + [("c", *size) for size in SIZES if size[2] == torch.float32],
    indirect=["form"],
)
def test_each_rounding_is_to_the_nearest_level_in_float64(
    numel: int, block_format: BlockFormat, dtype: torch.dtype
) -> None:
    bits, block_size = block_format
    for world_size in range(1, 5):
        flats = gradients(numel, world_size, dtype)
        before = [flat.clone() for flat in flats]
        step = Step(flats, None, block_format)
        shares = []
        for flat, message in zip(flats, step.sent, strict=True):
            c, scale = padded(flat.float(), message, block_format), scale_of_each(message, block_format)
            highest, lowest = c.reshape(-1, block_size).max(1), c.reshape(-1, block_size).min(1)
            top = np.where(highest >= -lowest, highest, lowest)
            if bits == 8:
                np.testing.assert_allclose(scale[::block_size], np.abs(top) / 127, rtol=1e-6)
                assert block_format.split(message).codes.min() >= -127
            else:  # cut to 8 bits
                np.testing.assert_allclose(scale[::block_size], -top / 96 * (1 - 2**-8), rtol=1.01 * 2**-8)
            shares.append(decoded(message, block_format))
            error = np.abs(shares[-1] - c)
            assert (error <= rounding_error(c, scale, bits) + 1e-4 * np.abs(scale)).all()
            assert not shares[-1][numel:].any()
        mean = np.mean(shares, axis=0)
        np.testing.assert_allclose(step.shard_means.numpy().ravel(), mean, rtol=1e-5, atol=1e-6)
        got, scale = decoded(step.gathered, block_format), scale_of_each(step.gathered, block_format)
        assert (np.abs(got - mean) <= rounding_error(mean, scale, bits) + 1e-4 * np.abs(scale)).all()
        torch.testing.assert_close(step.mean, torch.from_numpy(got[:numel]).float().to(dtype), rtol=0, atol=0)
        assert step.finite
        assert all(torch.equal(flat, old) for flat, old in zip(flats, before, strict=True))


@pytest.mark.parametrize(
    ("block_format", "most", "zeroed_below"), [(BlockFormat(8, 256), 0.01, 0.05), (BlockFormat(4, 32), 0.15, 0.2)]
)
@pytest.mark.parametrize(("world_size", "outliers"), [(1, 3), (2, 0), (4, 3)])
def test_the_mean_is_close(
    block_format: BlockFormat, most: float, zeroed_below: float, world_size: int, outliers: int
) -> None:
    flats = gradients(100_000, world_size)
    places = torch.arange(outliers) * 29_989 + 7
    for flat in flats:
        flat[places] = 1e4
    exact = torch.stack(flats).double().mean(0)
    error = Step(flats, None, block_format).mean.double() - exact
    assert error.norm() <= most * exact.norm()
    small = torch.ones(100_000, dtype=torch.bool)
    small[places] = False
    # Two scales of a block without an outlier: what is smaller may well be rounded to zero.
    zeroed = (error == -exact) & small & (exact.abs() > zeroed_below)
    assert zeroed.sum() <= 0.01 * small.sum()
    for place in places:
        small[place // 256 * 256 :][:256] = False
    assert error[small].norm() <= most * exact[small].norm()


@pytest.mark.parametrize(
    ("form", "dtype", "atol"),
    [("torch", torch.float32, 1e-6), ("torch", torch.bfloat16, 1e-3), ("c", torch.float32, 1e-6)],
    indirect=["form"],
)
@pytest.mark.parametrize("world_size", sampled([1, 2, 3, 4], by_default=[3]))
@BOTH
def test_what_was_sent_and_the_mean_residual_are_the_mean_gradient(
    block_format: BlockFormat, world_size: int, dtype: torch.dtype, atol: float
) -> None:
    """If this fails, part of a gradient is lost for good, or sent twice."""
    residuals = [torch.zeros(1500, dtype=dtype) for _ in range(world_size)]
    sent, given = torch.zeros(2, 1500, dtype=torch.float64)
    for seed in range(20):
        flats = gradients(1500, world_size, seed=seed)
        given += torch.stack(flats).double().mean(0)
        sent += Step(flats, residuals, block_format).mean
        kept = torch.stack(residuals).double().mean(0)
        torch.testing.assert_close(
            sent + kept, given, rtol=0, atol=(seed + 1) * atol * (1 if block_format.bits == 8 else 8)
        )
    assert kept.abs().max() < (0.1 if block_format.bits == 8 else 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("torch", torch.float32), ("torch", torch.bfloat16), ("c", torch.float32)],
    indirect=["form"],
)
@BOTH
def test_a_block_that_is_not_finite_is_seen_by_all_and_undone(
    block_format: BlockFormat, bad: float, dtype: torch.dtype
) -> None:
    flats = gradients(1000, 3, seed=1)
    flats[1][500] = bad
    residuals = [flat.mul(0.01).to(dtype) for flat in gradients(1000, 3, seed=2)]
    before = [residual.clone() for residual in residuals]
    size = block_format.block_size
    block = slice(500 // size * size, 500 // size * size + size)

    step = Step(flats, residuals, block_format)

    outside = torch.ones(1000, dtype=torch.bool)
    outside[block] = False
    assert not step.finite
    assert not step.mean[block].isfinite().any()
    assert step.mean[outside].isfinite().all()
    assert torch.equal(step.encoded_residuals[1][block], before[1][block])
    assert all(residual.isfinite().all() for residual in residuals)
    step.undo(step.finite)
    # In bfloat16 what `encode` and `reduce` left was rounded to 8 bits.
    for residual, old in zip(residuals, before, strict=True):
        torch.testing.assert_close(
            residual, old, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-4 if block_format.bits == 8 else 6e-3
        )


@BOTH
def test_a_finite_step_is_not_undone(block_format: BlockFormat) -> None:
    residuals = gradients(1000, 2, seed=2)
    step = Step(gradients(1000, 2), residuals, block_format)
    after = [residual.clone() for residual in residuals]
    step.undo(step.finite)
    assert all(torch.equal(residual, old) for residual, old in zip(residuals, after, strict=True))


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-36, 1e30, 3.4028234e38])
@pytest.mark.parametrize(
    ("block_format", "top_level", "error"), [(BlockFormat(8, 32), 127, 0.50005), (BlockFormat(4, 32), 96, 19)]
)
def test_extreme_magnitudes_stay_finite_and_in_proportion(
    block_format: BlockFormat, top_level: int, error: float, size: float
) -> None:
    flats = [torch.linspace(-1, 1, 257).mul(size) for _ in range(3)]
    residuals = [torch.zeros(257) for _ in range(3)]
    step = Step(flats, residuals, block_format)
    assert step.finite
    assert all(residual.isfinite().all() for residual in residuals)
    scale = np.abs(scale_of_each(step.gathered, block_format)[:257])
    assert scale.max() <= max(size / top_level * (1 + 1e-6), 2.0**-126)
    assert size or not scale.any()
    # A block whose codes are all 0 has none, and what was lost of it was below the smallest.
    scale = np.maximum(scale, 2.0**-126)
    lost = step.mean.double().numpy() - flats[0].double().numpy()
    assert (np.abs(lost) <= 2 * error * scale * (1 + 1e-5)).all()


@pytest.mark.parametrize("form", ["torch"], indirect=True)
def test_float64_beyond_float32_counts_as_infinite() -> None:
    step = Step([torch.tensor([1e300, 1.0], dtype=torch.float64)], None, BlockFormat(8, 16))
    assert not step.finite


@pytest.mark.parametrize(
    ("form", "bits", "codes", "values"),
    [
        ("torch", 8, [127, -64, 13, 0], [1, -0.5039, 0.1024, 0]),
        ("c", 8, [127, -64, 13, 0], [1, -0.5039, 0.1024, 0]),
        ("torch", 4, [-2 << 4 | 8, 5], [0.9961, -0.4669, 0.1245, 0]),  # C takes blocks of 32 and more
    ],
    indirect=["form"],
)
def test_the_worked_example(bits: int, codes: list[int], values: list[float]) -> None:
    block_format, flat, residual = BlockFormat(bits, 4), torch.tensor([1, -0.5, 0.1, 0]), torch.zeros(4)
    message = empty_message(4, 1, block_format)
    blockwise.encode(flat, residual, message, block_format)
    assert block_format.split(message).codes.tolist() == [[codes]]
    mean = torch.empty(4)
    blockwise.decode(message, mean, block_format)
    torch.testing.assert_close(mean, torch.tensor(values), rtol=0, atol=1e-4)
    torch.testing.assert_close(residual, flat - mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "dtype"),
    sampled(
        [("torch", torch.float32), ("torch", torch.bfloat16), ("c", torch.float32)],
        by_default=[("torch", torch.bfloat16), ("c", torch.float32)],
    ),
    indirect=["form"],
)
@BOTH
def test_parts_are_as_the_whole(monkeypatch: pytest.MonkeyPatch, block_format: BlockFormat, dtype: torch.dtype) -> None:
    """Small buckets fit into one part; if this fails, large ones are wrong."""
    steps = []
    for num in (2**19, 512, 64):
        monkeypatch.setattr(blockwise_format, "CHUNK_NUMEL", num)
        flats = gradients(5001, 2, seed=1)
        flats[0][900] = float("nan")
        residuals = [residual.to(dtype) for residual in gradients(5001, 2, seed=2)]
        step = Step(flats, residuals, block_format)
        step.undo(step.finite)
        steps.append([step.mean, *step.encoded_residuals, *residuals])
    for other in steps[1:]:
        torch.testing.assert_close(other, steps[0], rtol=0, atol=0, equal_nan=True)


def fuses() -> bool:
    """Whether torch rounds once in addcmul on this processor, as Triton's form does; else codes may differ by one."""
    a = torch.full((64,), 1 + 2**-12)
    return bool((torch.addcmul(-a * a, a, a) != 0).all())


def results(
    form: str,
    device: str,
    numel: int,
    world_size: int,
    block_format: BlockFormat,
    dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    magnitude: float = 1.0,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The messages, the mean and the residuals of a step that is not finite if it has 1500 elements, or many."""
    flats = [flat.mul(magnitude).to(device) for flat in gradients(numel, world_size, dtype)]
    flats[0][numel // 2] = float("nan") if numel == 1500 else 0
    if numel > 2 * 4096:
        flats[-1][numel - 3] = float("inf")
    residuals = None
    if residual_dtype is not None:
        residuals = [x.mul(0.01 * magnitude).to(device, residual_dtype) for x in gradients(numel, world_size, seed=1)]
    with in_form(form, "encode", "reduce", "average", "decode"):
        step = Step(flats, residuals, block_format)
        after = [x.clone() for x in residuals or []]
        if residuals:
            step.undo(step.finite)
    residuals_after = [*step.encoded_residuals, *after, *(residuals or [])]
    means = [step.mean.cpu(), step.shard_means.cpu()]
    return [x.cpu() for x in (*step.sent, step.gathered)], means, [x.cpu() for x in residuals_after]


# A tile of Triton's has 4096 elements: shards of several, with a last one that is not full.
SEVERAL_TILES: list[tuple[int, int, BlockFormat, torch.dtype, torch.dtype | None]] = [
    (2 * 4096 * 3 + 100, 2, BlockFormat(8, 128), torch.float32, torch.float32),
    (2 * 4096 * 3 + 100, 2, BlockFormat(4, 32), torch.float32, torch.float32),
    (3 * 4096 * 2 + 17, 3, BlockFormat(8, 16), torch.float32, torch.bfloat16),
    (2 * 4096 * 2 + 1000, 2, BlockFormat(4, 256), torch.float32, None),
]


def forms_agree(
    form: str, device: str, dtypes: list[torch.dtype], error: float, bfloat16_error: float, every: int = 1
) -> None:
    """Compares every result of a step in one form, on ``device``, to those in plain torch on CPU.

    Args:
        form: "triton" or "c".
        device: where it runs.
        dtypes: of the gradients.
        error: by how much scales may differ, relatively.
        bfloat16_error: by how much a mean in bfloat16 may, relatively.
        every: compares only one of so many cases.
    """
    residual_dtypes = (None, torch.float32, torch.bfloat16)
    formats = [BlockFormat(8, size) for size in (16, 16, 256, 64)] + [
        BlockFormat(4, size) for size in (32, 32, 256, 64)
    ]
    sizes = zip(2 * (1, 300, 300, 1500), 2 * (1, 3, 2, 3), formats, strict=True)
    products = itertools.product(sizes, dtypes, residual_dtypes)
    cases = [(*size, dtype, residual_dtype) for size, dtype, residual_dtype in products][::every]
    for case in [*cases, *SEVERAL_TILES]:
        if form == "c" and case[4] == torch.bfloat16:
            continue
        messages, means, residuals = results("torch", "cpu", *case)
        its_messages, its_means, its_residuals = results(form, device, *case)
        for message, its_message in zip(messages, its_messages, strict=True):
            codes, scales = case[2].split(message)
            its_codes, its_scales = case[2].split(its_message)
            assert torch.equal(its_scales.isfinite(), scales.isfinite())
            usable = scales.isfinite()
            torch.testing.assert_close(its_scales[usable], scales[usable], rtol=error, atol=0)
            assert torch.equal(its_codes[usable], codes[usable])
        mean_rtol = bfloat16_error if case[3] == torch.bfloat16 else error
        for its_mean, mean in zip(its_means, means, strict=True):
            finite = mean.isfinite()  # codes of blocks without a finite scale are any
            assert torch.equal(its_mean.isfinite(), finite)
            torch.testing.assert_close(its_mean[finite], mean[finite], rtol=mean_rtol, atol=0)
        residual_atol = 8e-3 if case[4] == torch.bfloat16 else 1e-6
        torch.testing.assert_close(its_residuals, residuals, rtol=0, atol=residual_atol)


@pytest.mark.skipif(not fuses(), reason="this processor rounds twice in addcmul")
@pytest.mark.parametrize("form", ["c"], indirect=True)
def test_c_gives_the_bits_of_plain_torch() -> None:
    """If it fails, a step depends on whether there is a compiler."""
    forms_agree("c", "cpu", [torch.float32], error=0, bfloat16_error=0)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Restores the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@BOTH
@pytest.mark.parametrize("form", ["c"], indirect=True)
@pytest.mark.usefixtures("restored_threads")
def test_threads_change_no_bit_in_c(block_format: BlockFormat) -> None:
    """If it fails, ranks with other numbers of threads drift apart."""
    steps = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        # Each of the two shards is large enough for several threads.
        steps.append(results("c", "cpu", 140_001, 2, block_format, torch.float32, torch.float32))
    for other in steps[1:]:
        torch.testing.assert_close(other, steps[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.skipif(not fuses(), reason="this processor rounds twice in addcmul")
@pytest.mark.parametrize("form", ["torch"], indirect=True)
def test_triton_gives_the_bits_of_plain_torch_in_its_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.skipif(not fuses(), reason="this processor rounds twice in addcmul")
@pytest.mark.parametrize("form", ["torch"], indirect=True)
def test_triton_gives_the_bits_of_plain_torch_on_cuda() -> None:
    forms_agree("triton", "cuda", DTYPES, error=0, bfloat16_error=0)
    extremes_agree("cuda")


def extremes_agree(device: str) -> None:
    """Compares the bits of steps whose scales, divided by the number of ranks, are subnormal, and of the largest."""
    for world_size, numel in ((3, 300), (7, 2000)):
        case = (numel, world_size, BlockFormat(8, 16), torch.float32, torch.float32, 2.0**-119)
        plain, in_triton = results("torch", "cpu", *case), results("triton", device, *case)
        torch.testing.assert_close(in_triton[:2], plain[:2], rtol=0, atol=0)
    for block_format in (BlockFormat(8, 32), BlockFormat(4, 32)):
        flat, sent = torch.linspace(-1, 1, 64) * torch.finfo(torch.float32).max, []
        for form, its_device in (("torch", "cpu"), ("triton", device)):
            sent.append(empty_message(64, 1, block_format, its_device))
            with in_form(form):
                blockwise.encode(flat.to(its_device), None, sent[-1], block_format)
        assert sent[1].cpu().equal(sent[0])


def a_far_tile_is_found() -> None:
    """Decodes and encodes one tile behind 2**31 codes of a row, in files that take no room but for it."""
    from triton.runtime.interpreter import interpreter_builder

    from lightning_commopt.compressors.kernels import blockwise_triton

    block_format, far, numel = BlockFormat(8, 128), 2**31, 2**31 + blockwise_triton._TILE_NUMEL
    launch = blockwise_triton.launch

    def launch_last(kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        def begin_last(*_: int) -> None:
            interpreter_builder.grid_idx = (grid[0] - 1, 0, 0)

        with mock.patch.object(interpreter_builder, "set_grid_idx", begin_last):
            launch(kernel, (1, 1, 1), *args, **options)

    with tempfile.TemporaryDirectory() as folder, in_form("triton"):
        flat = torch.from_numpy(np.memmap(f"{folder}/flat", np.float32, "w+", shape=numel))
        row = torch.from_numpy(np.memmap(f"{folder}/row", np.uint8, "w+", shape=block_format.shard_bytes(numel, 1)))
        codes, _ = block_format.split(row)
        flat[far:] = 2.0
        with mock.patch.object(blockwise_triton, "launch", launch_last):
            blockwise.encode(flat, None, row.view(1, -1), block_format)
            assert (codes.view(-1)[far:] == 127).all()
            flat[far:] = 0
            blockwise.decode(row.view(1, -1), flat, block_format)
            assert (flat[far:] > 1.99).all()


if __name__ == "__main__":
    # Triton's interpreter rounds twice in an fma before 3.9, and cuts bfloat16 off where devices round to nearest.
    rounds_once = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
    with checked_multiples():
        forms_agree("triton", "cpu", DTYPES, error=0 if rounds_once else 2**-22, bfloat16_error=2**-7, every=5)
        if rounds_once:
            extremes_agree("cpu")
        a_far_tile_is_found()
    print("agree")
