"""Speed of PyTorch's scaled_dot_product_attention, flash and cuDNN backends, on the shapes of attention_bench.cu.

Causal, bf16, 16k tokens a batch, 32 query heads and 8 K/V heads. The backward pass is counted as 2.5 times the forward's
operations, a causal mask as half of them.
"""

import argparse
import statistics

import needs_gpu  # before torch, which may be missing
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HEADS, KV_HEADS = 16384, 32, 8


def median_ms(run, repetitions: int) -> float:
    times = []
    for i in range(-3, repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= 0:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure(name: str, backend: SDPBackend, T: int, HS: int, repetitions: int) -> None:
    def tensor(heads: int) -> torch.Tensor:
        rows = torch.randn(TOKENS // T, T, heads, HS, device="cuda", dtype=torch.bfloat16)
        return rows.transpose(1, 2).requires_grad_()

    q, k, v = tensor(HEADS), tensor(KV_HEADS), tensor(KV_HEADS)
    dout = torch.randn_like(q)
    with sdpa_kernel(backend):
        def forward() -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        out = forward()
        forward_ms = median_ms(forward, repetitions)
        backward_ms = median_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), repetitions)
    operations = 4 * TOKENS * T * HEADS * HS / 2
    print(f"hd{HS:<4} T {T:<6} forward {forward_ms:7.3f} ms {operations / forward_ms / 1e9:6.1f} TF/s   "
          f"backward {backward_ms:7.3f} ms {2.5 * operations / backward_ms / 1e9:6.1f} TF/s   {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=21)
    repetitions = parser.parse_args().repetitions
    needs_gpu.by_torch(torch.cuda.is_available())
    print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}, median of {repetitions}")
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        for HS in (64, 80, 128):
            for T in (1024, 2048, 4096, 8192, 16384):
                try:
                    measure(name, backend, T, HS, repetitions)
                except RuntimeError as error:
                    print(f"hd{HS} T {T}: {name} refuses: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
