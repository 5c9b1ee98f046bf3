"""What the CUDA driver says of the first device: `device.py` prints Markdown lines, `device.py --peaks` the arguments
memory=GB/s and fma=TFLOP/s for the ladder, from clocks, bus width and cores. Exit 1 where there is no device."""

import ctypes
import sys

CLOCK, PROCESSORS, MEMORY_CLOCK, BUS_WIDTH, L2, MAJOR, MINOR = 13, 16, 36, 37, 38, 75, 76
CORES = {75: 64, 80: 64}  # f32 lanes of a multiprocessor; of all others 128


def open_device():
    """The driver, and its device 0; None where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    n, device = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n)) or n.value < 1:
        return None
    return None if cuda.cuDeviceGet(ctypes.byref(device), 0) else (cuda, device)


def main():
    found = open_device()
    if not found:
        sys.exit("no CUDA device")
    cuda, device = found
    value, name = ctypes.c_int(0), ctypes.create_string_buffer(256)

    def ask(attribute):
        return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) else value.value

    arch = 10 * ask(MAJOR) + ask(MINOR)
    memory = 2e3 * ask(MEMORY_CLOCK) * ask(BUS_WIDTH) / 8 * 1e-9
    fma = 2e3 * ask(CLOCK) * ask(PROCESSORS) * CORES.get(arch, 128) * 1e-12
    if "--peaks" in sys.argv:
        print(*([f"memory={memory:.1f}"] if memory else []), *([f"fma={fma:.2f}"] if fma else []))
        return
    cuda.cuDeviceGetName(name, len(name), device)
    print(f"- {name.value.decode()}, sm_{arch}, {ask(PROCESSORS)} multiprocessors at up to {ask(CLOCK) / 1e6:.2f} GHz, "
          f"{ask(L2) / 2**20:.0f} MiB of L2")  # fmt: skip
    print(f"- by its attributes: {memory:.0f} GB/s of memory, {fma:.1f} TFLOP/s in f32")


main()
