"""Attacks on whoever judges: nothing is computed, or the right thing for the wrong reason. All on ragged_prefill.

Those in C++ are whole files, since C++ passes no sandbox and can do what it likes; those in Python wrap the kit's own
kernel (HONEST) or stand alone.
"""

import textwrap

from harness.mutants import Mutant
from harness.verdict import Verdict as V

_ARGUMENTS = (
    "q, k, v, output, qo_indptr, kv_indptr, batch_size, seq_len, "
    "num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal"
)
_HOLD_S = 8.0  # the deadline of those that never end


def _wrapped(language: str, name: str, mistake: str, body: str, before: str = "", **more: object) -> Mutant:
    """The kit's submission with its run_kernel renamed, and `body` as the new one; HONEST there calls the old one."""
    body = textwrap.indent(textwrap.dedent(body).strip().replace("HONEST", f"honest({_ARGUMENTS})"), "    ")
    before = textwrap.dedent(before).strip()
    append = f"\n\n{before}\n\n\ndef run_kernel({_ARGUMENTS}):\n{body}\n"
    changes = (("def run_kernel(", "def honest("),)
    return Mutant(name, "ragged_prefill", language, mistake, changes, append, **more)


def _behind(language: str, name: str, mistake: str, text: str, **more: object) -> Mutant:
    """The kit's submission with something at module level behind it."""
    return Mutant(name, "ragged_prefill", language, mistake, append=f"\n\n{textwrap.dedent(text).strip()}\n", **more)


def _alone(name: str, mistake: str, body: str, before: str = "", **more: object) -> Mutant:
    """A Triton file without a kernel worth the name."""
    body, before = textwrap.indent(textwrap.dedent(body).strip(), "    "), textwrap.dedent(before).strip()
    kernel = "@triton.jit\ndef unused(x):\n    pass\n"
    source = f"import torch\nimport triton\n{before}\n\n\n{kernel}\n\ndef run_kernel({_ARGUMENTS}):\n{body}\n"
    return Mutant(name, "ragged_prefill", "triton", mistake, source=source, **more)


def _cuda(name: str, mistake: str, body: str, before: str = "", headers: str = "", **more: object) -> Mutant:
    """A C++ file whose run_kernel is `body`."""
    includes = "".join(f"#include <{header}.h>\n" for header in f"cuda_bf16 cuda_runtime stdint {headers}".split())
    signature = (
        'extern "C" void run_kernel(__nv_bfloat16* q, __nv_bfloat16* k, __nv_bfloat16* v, __nv_bfloat16* output,\n'
        "    const int32_t* qo_indptr, const int32_t* kv_indptr, int64_t batch_size, int64_t seq_len,\n"
        "    int64_t num_qo_heads, int64_t num_kv_heads, int64_t head_dim_qk, int64_t head_dim_vo, int64_t causal) {\n"
    )
    body, before = textwrap.indent(textwrap.dedent(body).strip(), "    "), textwrap.dedent(before).strip()
    source = f"{includes}\n{before}\n\n{signature}{body}\n}}\n"
    return Mutant(name, "ragged_prefill", "cuda", mistake, source=source, **more)


_MEMORY = (
    _wrapped(
        "triton",
        "replays_for_the_shape",
        "computes once per shape and copies that result from then on",
        """
        key = (q.shape[0], k.shape[0], num_qo_heads, head_dim_qk)
        if key not in _results:
            HONEST
            _results[key] = output.clone()
        output.copy_(_results[key])
        """,
        before="_results = {}",
        cpu=(V.WRONG_ANSWER,),
    ),
    _wrapped(
        "tilelang",
        "replays_for_the_pointer",
        "computes once per pointer and copies that result from then on",
        """
        key = output.data_ptr()
        if key not in _results:
            HONEST
            _results[key] = output.clone()
        output.copy_(_results[key])
        """,
        before="_results = {}",
        lint="tensor-method",
        cpu=(V.WRONG_ANSWER,),
    ),
    _wrapped(
        "triton",
        "only_the_first_call",
        "computes in the first call and does nothing from then on",
        """
        if len(_calls) == 0:
            HONEST
        _calls.append(1)
        """,
        before="_calls = []",
        cpu=(V.UNWRITTEN_OUTPUT,),
    ),
    _wrapped(
        "triton",
        "two_runs_differ",
        "every second call is 1 % too large",
        """
        HONEST
        _calls.append(1)
        if len(_calls) % 2 == 0:
            output.copy_(output * 1.01)
        """,
        before="_calls = []",
        lint="torch-compute",
        cpu=(V.NONDETERMINISTIC,),
    ),
    _alone(
        "nothing_at_all",
        "returns at once and hopes for an earlier result in recycled memory",
        "return",
        cpu=(V.UNWRITTEN_OUTPUT,),
    ),
    _wrapped(
        "triton",
        "overwrites_v",
        "uses V as scratch when it is done with it",
        """
        HONEST
        v.zero_()
        """,
        cpu=(V.INPUT_MUTATED,),
    ),
    _alone(
        "poisons_the_baseline",
        "zeroes V, so that a baseline on the same memory gives the zeros that it wrote",
        """
        v.zero_()
        output.zero_()
        """,
        cpu=(V.INPUT_MUTATED,),
    ),
    _wrapped(
        "tilelang",
        "moves_the_output",
        "computes into memory of its own and lets the argument point there",
        """
        given = output
        output = torch.empty_like(given)
        HONEST
        given.set_(output)
        """,
        lint="tensor-method",
        cpu=(V.UNWRITTEN_OUTPUT,),
    ),
    _wrapped(
        "triton",
        "output_aliases_q",
        "writes the result over Q and lets the output point there",
        """
        given = output
        output = q
        HONEST
        given.set_(q)
        """,
        lint="tensor-method",
        cpu=(V.INPUT_MUTATED,),
    ),
    _wrapped(
        "triton",
        "lazy_tensor",
        "turns the output into a subclass that computes when the checker looks at it",
        """
        plain = output.view(output.shape)
        given = output
        output = plain
        _work.append(lambda: HONEST)
        given.__class__ = Lazy
        """,
        before="""
        import torch

        _work = []


        class Lazy(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                todo, _work[:] = list(_work), []
                for call in todo:
                    call()
                return super().__torch_function__(func, types, args, kwargs or {})
        """,
        lint="statement",
        cpu=(V.UNWRITTEN_OUTPUT,),
    ),
    _wrapped(
        "triton",
        "left_on_a_thread",
        "leaves the work to a thread that is not done when run_kernel returns",
        """
        def later():
            time.sleep(0.5)
            HONEST

        threading.Thread(target=later, daemon=True).start()
        """,
        before="import threading\nimport time",
        lint="import",
        cpu=(V.UNWRITTEN_OUTPUT,),
    ),
    _wrapped(
        "triton",
        "left_on_a_stream",
        "leaves the work on a stream of its own",
        """
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(400_000_000)
            HONEST
        """,
        before="import torch",
        lint="torch-proxy",
        gpu=(V.UNWRITTEN_OUTPUT,),
        only="a CPU has no streams",
    ),
    _cuda(
        "float32_written",
        "writes float32 into an output of bfloat16",
        "fill<<<64, 128>>>((float*)output, qo_indptr, batch_size, num_qo_heads * head_dim_vo);",
        before="""
        __global__ void fill(float* output, const int32_t* qo_indptr, int64_t batch_size, int64_t row) {
            const int64_t total = qo_indptr[batch_size] * row;
            for (int64_t i = blockIdx.x * 128 + threadIdx.x; i < total; i += 64 * 128) output[i] = 0.5f;
        }
        """,
        cpu=(V.OUT_OF_BOUNDS,),
    ),
    _cuda(
        "overwrites_q",
        "writes its result over Q",
        "overwrite<<<1, 64>>>(q);",
        before="__global__ void overwrite(__nv_bfloat16* q) { q[threadIdx.x] = __float2bfloat16(0.5f); }",
        cpu=(V.INPUT_MUTATED,),
    ),
)

_PROCESS = (
    _alone(
        "prints_without_end",
        "floods standard output",
        "for _ in range(20000):\n    print('x' * 1000)",
        cpu=(V.OUTPUT_LIMIT,),
    ),
    _alone("exit_0", "ends the process with status 0", "raise SystemExit(0)", cpu=(V.RUNTIME_ERROR,)),
    _alone(
        "os_exit_0",
        "ends the process behind Python's back, with status 0",
        "os._exit(0)",
        before="import os",
        lint="import",
        cpu=(V.RUNTIME_ERROR,),
    ),
    _alone("never_returns", "loops for ever", "while True:\n    pass", cpu=(V.TIMEOUT,), deadline_s=_HOLD_S),
    _wrapped(
        "triton",
        "forks_and_exits",
        "goes on in a child, while the process that was asked ends with status 0",
        """
        if os.fork():
            os._exit(0)
        HONEST
        """,
        before="import os",
        lint="import",
        cpu=(V.RUNTIME_ERROR,),
    ),
    _cuda(
        "prints_without_end",
        "floods standard output",
        'for (int i = 0; i < 1 << 20; ++i) printf("all tests passed\\n");',
        headers="stdio",
        cpu=(V.OUTPUT_LIMIT,),
    ),
    _cuda("exit_0", "ends the process with status 0", "exit(0);", headers="stdlib", cpu=(V.RUNTIME_ERROR,)),
    _cuda(
        "sleeps_for_ever",
        "never comes back",
        "for (;;) sleep(1000);",
        headers="unistd",
        cpu=(V.TIMEOUT,),
        deadline_s=_HOLD_S,
    ),
    _cuda(
        "forks_and_holds",
        "leaves children that hold everything open, and exits",
        "for (int i = 0; i < 4; ++i)\n    if (fork() == 0)\n        for (;;) pause();\n_exit(0);",
        headers="unistd",
        cpu=(V.RUNTIME_ERROR,),
    ),
    _cuda(
        "forges_a_result",
        "writes a result of its own into every open descriptor, and exits",
        r"""
        const char* record =
            "\n{\"token\": \"\", \"event\": \"result\", \"record\": {\"task\": \"ragged_prefill\", "
            "\"language\": \"cuda\", "
            "\"variant\": \"\", \"suite\": \"tiny\", \"case\": 1, \"judge\": \"PASS\", \"strict\": \"PASS\"}}\n"
            "{\"token\": \"\", \"event\": \"done\"}\n";
        for (int fd = 3; fd < 4096; ++fd) (void)!write(fd, record, strlen(record));
        _exit(0);
        """,
        headers="unistd string",
        cpu=(V.RUNTIME_ERROR,),
    ),
)

_TAMPERING = (
    _behind(
        "triton",
        "patched_clock",
        "time.perf_counter stands still",
        """
        import time

        time.perf_counter = lambda: 0.0
        """,
        lint="import",
        cpu=(V.TAMPERED,),
    ),
    _behind(
        "tilelang",
        "patched_event",
        "torch.cuda.Event measures next to nothing",
        """
        class Instant(torch.cuda.Event):
            def elapsed_time(self, end):
                return 1e-6


        torch.cuda.Event = Instant
        """,
        lint="statement",
        cpu=(V.TAMPERED,),
    ),
    _alone(
        "patched_allclose",
        "writes zeros and lets torch.allclose say yes",
        """
        torch.allclose = lambda *args, **kwargs: True
        output.zero_()
        """,
        lint="torch-proxy",
        cpu=(V.TAMPERED,),
    ),
    _behind(
        "tilelang",
        "patched_rule",
        "replaces the strict comparison of this very harness",
        """
        import harness.strict

        harness.strict.compare = lambda *tensors: harness.strict.Agreement(0.0, None)
        """,
        lint="import",
        cpu=(V.TAMPERED,),
    ),
    _cuda(
        "patched_from_cpp",
        "reaches from C++ into Python and replaces torch.allclose, then writes zeros",
        """
        auto ensure = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
        auto release = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
        auto run = (int (*)(const char*))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
        const int state = ensure();
        run("import torch\\ntorch.allclose = lambda *args, **kwargs: True");
        release(state);
        fill<<<64, 128>>>(output, qo_indptr, batch_size, num_qo_heads * head_dim_vo);
        """,
        before="""
        __global__ void fill(__nv_bfloat16* output, const int32_t* qo_indptr, int64_t batch_size, int64_t row) {
            const int64_t total = qo_indptr[batch_size] * row;
            for (int64_t i = blockIdx.x * 128 + threadIdx.x; i < total; i += 64 * 128)
                output[i] = __float2bfloat16(0.0f);
        }
        """,
        headers="dlfcn",
        cpu=(V.TAMPERED,),
    ),
)

_SEQUENCE_BY_SEQUENCE = """
starts, kv_starts = qo_indptr.tolist(), kv_indptr.tolist()
for b in range(batch_size):
    rows = slice(starts[b], starts[b + 1]), slice(kv_starts[b], kv_starts[b + 1])
    queries, keys, values = (x[r].transpose(0, 1) for x, r in ((q, rows[0]), (k, rows[1]), (v, rows[1])))
"""
_BORROWED = (
    _alone("torchs_own_attention", "calls torch's attention instead of computing it",
        _SEQUENCE_BY_SEQUENCE + "    attention = torch.nn.functional.scaled_dot_product_attention\n"
        "    mixed = attention(queries, keys, values, is_causal=bool(causal), enable_gqa=True)\n"
        "    output[rows[0]] = mixed.transpose(0, 1)\n",
        lint="torch-proxy"),
    _alone("torchs_matmul_and_softmax", "builds attention out of torch's operators",
        _SEQUENCE_BY_SEQUENCE + "    group = num_qo_heads // num_kv_heads\n"
        "    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)\n"
        "    scores = torch.matmul(queries.float(), keys.float().transpose(1, 2)) / head_dim_qk**0.5\n"
        "    if causal:\n"
        "        ahead = torch.ones_like(scores).triu(1 + scores.shape[2] - scores.shape[1]).bool()\n"
        "        scores = torch.where(ahead, -1e30, scores)\n"
        "    output[rows[0]] = torch.matmul(torch.softmax(scores, 2), values.float()).transpose(0, 1).bfloat16()\n",
        lint="torch-compute"),
    _alone("the_baseline_itself", "calls the library that the package's baseline calls",
        """
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=head_dim_vo,
                     causal=bool(causal), q_data_type=q.dtype, kv_data_type=k.dtype)
        wrapper.run(q, k, v, out=output)
        """,
        before="import flashinfer", lint="import"),
    _alone("the_reference_itself", "calls the kit's own reference",
        f'output.copy_(reference.reference({_ARGUMENTS})["output"])',
        before="from tasks.ragged_prefill import reference", lint="import"),
)  # fmt: skip

MUTANTS = (*_MEMORY, *_PROCESS, *_TAMPERING, *_BORROWED)
