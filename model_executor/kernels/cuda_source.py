"""Kernels written in CUDA C++: compiled by NVRTC when they are first needed, and launched through the driver.

For what Triton has no words for. Everything here comes with torch's own builds for CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import OutriderError

_MAP_BYTES = 128  # of a CUtensorMap


class CudaSourceError(OutriderError):
    """A source that does not compile, a call of the driver or of the compiler that failed, or neither is there."""


class CudaKernel:
    """A kernel of a source file, compiled for the current device.

    Args:
        source: a file of CUDA C++.
        name: of the kernel in it, extern "C".
        defines: what the source is compiled with.

    Raises:
        CudaSourceError: it does not compile; says what the compiler said.
    """

    def __init__(self, source: Path, name: str, defines: Mapping[str, int]) -> None:
        driver = _driver()
        torch.cuda.current_stream()  # the driver's calls need torch's context
        self._module = _check(driver.cuModuleLoadData(_compile(source, defines)))
        self._kernel = _check(driver.cuModuleGetFunction(self._module, name.encode()))

    def read_ints(self, symbol: str) -> list[int]:
        """A constant array of int that the source defines, extern "C"."""
        driver = _driver()
        address, num_bytes = _check(driver.cuModuleGetGlobal(self._module, symbol.encode()))
        values = (ctypes.c_int * (num_bytes // 4))()
        _check(driver.cuMemcpyDtoH(values, address, num_bytes))
        return list(values)

    def allow_shared_memory(self, num_bytes: int) -> None:
        """Let launches ask for so much, beyond what the source declares with a size."""
        driver = _driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self._kernel, attribute, num_bytes))

    def launch(self, grid: int, threads: int, shared_bytes: int, arguments: KernelArguments) -> None:
        """Enqueue on torch's current stream.

        It may begin as soon as all programs of the kernel in front have let it (`griddepcontrol`), or have ended.
        """
        driver = _driver()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        begins_early = driver.CUlaunchAttribute()
        begins_early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        begins_early.value = value
        config.attrs, config.numAttrs = [begins_early], 1
        _check(driver.cuLaunchKernelEx(config, self._kernel, arguments.address, 0))


class KernelArguments:
    """Arguments of a launch, made once: the driver copies them with every launch.

    Args:
        maps: tensor maps, the first arguments.
        struct: the last argument.
        tensors: whose addresses stand in either, to be kept.
    """

    def __init__(self, maps: Sequence[bytes], struct: ctypes.Structure, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        size = len(maps) * _MAP_BYTES
        self._memory = ctypes.create_string_buffer(size + 64)
        start = -(-ctypes.addressof(self._memory) // 64) * 64  # maps want to be aligned
        self._struct = struct
        places = [start + index * _MAP_BYTES for index in range(len(maps))]
        for place, tensor_map in zip(places, maps, strict=True):
            ctypes.memmove(place, tensor_map, _MAP_BYTES)
        self._pointers = (ctypes.c_void_p * (len(maps) + 1))(*places, ctypes.addressof(struct))
        self.address = ctypes.addressof(self._pointers)


def make_tensor_map(matrix: Tensor, box_rows: int, box_columns: int) -> bytes:
    """Descriptor of a matrix for the copy engine, as [columns / 64][rows][64] with 128 bytes of a row swizzled.

    Args:
        matrix: [rows, columns] bfloat16, contiguous; columns a multiple of 64.
        box_rows, box_columns: what one copy takes; rows beyond the matrix are 0.
    """
    driver = _driver()
    rows, columns = matrix.shape
    encoded = _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            matrix.data_ptr(),
            [driver.cuuint64_t(size) for size in (64, rows, columns // 64)],
            [driver.cuuint64_t(stride) for stride in (columns * 2, 128)],
            [driver.cuuint32_t(size) for size in (64, box_rows, box_columns // 64)],
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)


def _driver() -> Any:
    return _import("cuda.bindings.driver")


def _import(name: str) -> Any:
    """Imported late: a machine without CUDA has no use for them."""
    try:
        return import_module(name)
    except ImportError as error:
        raise CudaSourceError(f"no {name}, which comes with torch's builds for CUDA: {error}") from error


def _compile(source: Path, defines: Mapping[str, int]) -> bytes:
    nvrtc = _import("cuda.bindings.nvrtc")
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *(f"-D{k}={v}" for k, v in defines.items())]
    program = _check(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status[0]) != 0:
            log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise CudaSourceError(f"{source.name} does not compile:\n{log.decode(errors='replace').rstrip(chr(0))}")
        code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program))


def _check(result: Sequence[Any]) -> Any:
    """What a call returned besides its status.

    Raises:
        CudaSourceError: the status is no success.
    """
    status, *values = result
    if int(status) != 0:
        raise CudaSourceError(f"CUDA answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
