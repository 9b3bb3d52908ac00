"""Times residual add + RMSNorm in PyTorch, eager and compiled: the baseline of the norm rows of operators_bench.cu.

Same shapes, same bytes, same method: bf16, 16,384 rows, buffers that rotate past L2, median of 9 batches of 10.
Forward reads x and residual and writes h and the norm; backward is the whole of autograd for both outputs.
"""

import argparse
import statistics

import needs_gpu  # before torch, which may be missing
import torch

ROWS = 16384
COLD_BYTES = 1 << 30


def norm(x, residual, weight):
    h = x + residual
    return h, torch.nn.functional.rms_norm(h, (h.shape[-1],), weight, 1e-5)


def median_us(launch):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(3):
        launch(turn)
    times = []
    for repeat in range(9):
        begin.record()
        for i in range(10):
            launch(3 + 10 * repeat + i)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    return statistics.median(times)


def random_rows(columns, count):
    return [torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def forward_us(function, columns, weight):
    sets = max(2, COLD_BYTES // (ROWS * columns * 8))
    x, residual = random_rows(columns, sets), random_rows(columns, sets)
    with torch.no_grad():
        return median_us(lambda turn: function(x[turn % sets], residual[turn % sets], weight))


def backward_us(function, columns, weight):
    sets = max(2, COLD_BYTES // (ROWS * columns * 12))
    grads = [random_rows(columns, 2) for _ in range(sets)]
    graphs = []
    for x, residual in zip(random_rows(columns, sets), random_rows(columns, sets)):
        x.requires_grad_()
        residual.requires_grad_()
        graphs.append((function(x, residual, weight), (x, residual, weight)))

    def launch(turn):
        outputs, inputs = graphs[turn % sets]
        torch.autograd.grad(outputs, inputs, grads[turn % sets], retain_graph=True)

    return median_us(launch)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    arguments = parser.parse_args()
    needs_gpu.by_torch(torch.cuda.is_available())
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"{'':28s} {'MB':>8s} {'us':>9s} {'GB/s':>7s}")
    for columns in arguments.columns:
        torch._dynamo.reset()  # each width is compiled for itself, with no limit on how many
        weight = torch.ones(columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name, function in (("eager", norm), ("compiled", torch.compile(norm, dynamic=False))):
            for way, timer in (("forward", forward_us), ("backward", backward_us)):
                # Backward: dout, h and the skip gradient read; one gradient written serves x and residual.
                us, size = timer(function, columns, weight), 8 * ROWS * columns
                print(f"{way:8s} C {columns:5d} {name:11s} {size / 1e6:8.1f} {us:9.1f} {size / us / 1e3:7.0f}", flush=True)


if __name__ == "__main__":
    main()
