"""The peaks of devices, from the vendors' data sheets: cluster presets and the trainer use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Peaks = Mapping[str, float]
"""FLOP/s by precision."""

_A100: Final[Peaks] = {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}


def _peaks(fp32: float, half: float, fp8: float, in_blocks: str, nvfp4: float = 0.0) -> Peaks:
    """The peaks of a device whose type with a scale for each block is as fast as fp8."""
    peaks = {"fp32": fp32, "bf16": half, "fp16": half, "fp8": fp8, in_blocks: fp8}
    return peaks | ({"nvfp4": nvfp4} if nvfp4 else {})


# Hopper scales blocks beside its products in fp8. Blackwell has mxfp8, and runs fp8_block as that.
_HOPPER: Final = _peaks(66.9e12, 989.4e12, 1978.9e12, "fp8_block")
_HOPPER_NVL: Final = _peaks(60e12, 835.5e12, 1670.5e12, "fp8_block")

DEVICE_PEAKS: Final[Mapping[str, Peaks]] = {
    "V100": {"fp32": 15.7e12, "fp16": 125e12},
    "A100": _A100,
    "H100 PCIe": {"fp32": 51e12, "bf16": 756e12, "fp16": 756e12},
    "H100 NVL": _HOPPER_NVL,
    "H100": _HOPPER,
    # H800 data sheet: the H100's matrix units, with fewer links.
    "H800": _HOPPER,
    "H200 NVL": _HOPPER_NVL,
    # H200 data sheet: 67 fp32, 1,979 bf16 with sparsity (half of it dense); the H100's die.
    "H200": _HOPPER,
    "GH200": _HOPPER,
    # HGX B200 data sheet over its 8 devices: 640 TFLOP/s of fp32, and with sparsity, half of it
    # dense, 36 PFLOP/s of bf16 and 72 of fp8; dense, 72 of fp4. HGX B300: the same but 600 TFLOP/s
    # of fp32, and 108 PFLOP/s of fp4 (its table of one device rounds the 13.5 to 14).
    "B200": _peaks(80e12, 2250e12, 4500e12, "mxfp8", 9000e12),
    "B300": _peaks(75e12, 2250e12, 4500e12, "mxfp8", 13500e12),
    # GB200 NVL72 data sheet over its 72 devices: 5,760 TFLOP/s of fp32, and with sparsity, half of
    # it dense, 360 PFLOP/s of bf16 and 720 of fp8; dense, 720 of fp4. GB300 NVL72: the same but
    # 1,080 PFLOP/s of fp4; fp32 as in GB200.
    "GB200": _peaks(80e12, 2500e12, 5000e12, "mxfp8", 10000e12),
    "GB300": _peaks(80e12, 2500e12, 5000e12, "mxfp8", 15000e12),
    # A GCD, which is half of the package, as torch shows it.
    "MI250X": {"fp32": 47.9e12, "bf16": 191.5e12, "fp16": 191.5e12},
    # MI300X data sheet: matrix units; fp8 is the kind without negative zero (fnuz).
    "MI300X": {"fp32": 163.4e12, "bf16": 1307.4e12, "fp16": 1307.4e12, "fp8": 2614.9e12},
    # MI355X data sheet: matrix units, 2.5 PFLOP/s of bf16 and 5 of fp8, which is OCP's, with and
    # without scales of blocks. Its 10.1 PFLOP/s of MXFP4 are not those of nvfp4, which it lacks.
    "MI355X": _peaks(157.3e12, 2516.6e12, 5033.2e12, "mxfp8"),
}
"""Dense matrix peaks of one device, without sparsity, by a part of the device's name."""


def known_device(name: str) -> str | None:
    """The table's longest entry that is part of a device's name, as torch gives it, or None."""
    return max((known for known in DEVICE_PEAKS if known in name), key=len, default=None)
