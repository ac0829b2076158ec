"""The machine that runs kernels on the host finds the defects that it is for: kernels with one each."""

from __future__ import annotations

import pytest
from gpu_models import GPU_MODELS
from host_execution import HostFault, HostMachine

from autotune.families import Launch, Source, TensorMap

THREADS = 128


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> HostMachine:
    return HostMachine(tmp_path_factory.mktemp("machine"))


def run(
    machine: HostMachine,
    body: str,
    *,
    arch: str = "sm_90a",
    grid: int = 1,
    cluster: int = 1,
    workspace_bytes: int = 0,
    tensor: TensorMap | None = None,
    content: bytes = bytes(range(256)) * 16,
    threads: int = THREADS,
    seed: int = 1,
) -> bytes:
    """Run a kernel with 4 KiB of input and of dynamic shared memory and an output of a word for each thread."""
    parameters = "const __grid_constant__ ptx::TensorMap map, " if tensor else ""
    clusters = f" __cluster_dims__({cluster}, 1, 1)" if cluster > 1 else ""
    text = f"""#include "epilogue.cuh"
extern "C" __global__ void{clusters}
kernel({parameters}const u32* input, u32* output, u32* workspace) {{
  extern __shared__ __align__(1024) char shared[];
  u32* const words = reinterpret_cast<u32*>(shared);
  const u32 base = ptx::shared_address(shared);
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  u32 result = 0;
{body}
  output[blockIdx.x * blockDim.x + thread] = result;
}}
"""
    arguments = (*([tensor] if tensor else []), "input", "output", "workspace")
    return machine.run(
        Source(language="cuda", stem="kernel", text=text, entry="kernel"),
        Launch(grid=grid, block=threads, smem_bytes=4096, workspace_bytes=workspace_bytes, arguments=arguments),
        GPU_MODELS[arch],
        inputs={"input": content},
        output_bytes=grid * threads * 4,
        seed=seed,
        timeout_s=2,
    )


STAGE = "words[thread] = input[thread];\n"
COPY = "ptx::cp_async<4>(base + thread * 4, input + thread, true);\n"
WAIT = "ptx::cp_async_commit();\nptx::cp_async_wait<0>();\n"
# 16 rows of 64 bytes of the input, to the start of shared memory
TENSOR = TensorMap(operand="input", element_bytes=2, extents=(32, 40), strides=(64,), box=(32, 16), swizzle=64)
BARRIER = """__shared__ __align__(8) u64 place;
  const u32 barrier = ptx::shared_address(&place);
  if (thread == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
"""
BOX = """if (thread == 0) {
    ptx::barrier_expect(barrier, 1024);
    ptx::copy_box(base, &map, barrier, 0, 0);
  }
"""
# in each block of a cluster: of a box's copy, and of the threads that are done with it in either block
SHARED_BARRIERS = """__shared__ __align__(8) u64 places[2];
  const u32 full = ptx::shared_address(places), empty = full + 8, self = blockIdx.x % 2;
  if (thread == 0) {
    ptx::barrier_init(full, 1);
    ptx::barrier_init(empty, 2 * THREADS);
    ptx::barrier_init_fence();
  }
  ptx::sync_cluster();
""".replace("THREADS", str(THREADS))
UNSHARED_BARRIERS = SHARED_BARRIERS.replace("ptx::sync_cluster()", "__syncthreads()")
FIRST_BOX = """if (thread == 0) {
    ptx::barrier_expect(full, 1024);
    if (self == 0) ptx::multicast_box(base, &map, full, 3, 0, 0);
  }
  ptx::barrier_wait(full, 0);
  result = words[thread];
"""
RELEASE = """for (u32 block = 0; block < 2; ++block) ptx::barrier_arrive(empty, block);
"""
SECOND_BOX = """if (thread == 0) {
    ptx::barrier_wait(empty, 0);
    ptx::barrier_expect(full, 1024);
    if (self == 1) ptx::multicast_box(base, &map, full, 3, 16, 0);
  }
  ptx::barrier_wait(full, 1);
  result += words[thread];
"""
END = "ptx::sync_cluster();\n"
# products of rows that all hold the same 64 bytes: groups of eight rows lie in the same place
PRODUCT = """const u64 rows = ptx::matrix_descriptor<64>(base, 0);
  f32 sums[4];
  ptx::Wgmma<f16, 8>::run<false>(sums, rows, rows);
  ptx::wgmma_commit();
"""
# each block leaves a word for the other, and the second to come reads it
EXCHANGE = """workspace[64 + blockIdx.x * 64] = 7;
  {fence}
  __shared__ bool last;
  __syncthreads();
  if (thread == 0) last = atomicAdd(workspace, 1u) == 1;
  __syncthreads();
  {acquire}
  if (last) {read}
  if (thread == 0 && last) workspace[0] = 0;
"""
READ_L2 = "{ u32 found[4]; ptx::load_l2(found, workspace + 64 + (1 - blockIdx.x) * 64); result = found[0]; }"


def exchange(fence: str = "__threadfence();", acquire: str = "__threadfence();", read: str = READ_L2) -> str:
    """One thread of each block takes part."""
    body = EXCHANGE.format(fence=fence, acquire=acquire, read=read)
    return body.replace(
        "workspace[64 +", "if (thread == 0) *reinterpret_cast<Vector<16>*>(workspace + 64 +", 1
    ).replace("* 64] = 7;", "* 64) = Vector<16>{{7, 7, 7, 7}};", 1)


def words(content: bytes) -> list[int]:
    return [int.from_bytes(content[i : i + 4], "little") for i in range(0, len(content), 4)]


INPUT = words(bytes(range(256)) * 16)


def test_barriers_order_shared_memory(machine: HostMachine) -> None:
    for seed in range(4):
        found = words(run(machine, STAGE + "__syncthreads();\nresult = words[thread ^ 64];", seed=seed))
        assert found == [INPUT[thread ^ 64] for thread in range(THREADS)]
    assert words(run(machine, STAGE + "__syncwarp();\nresult = words[thread ^ 1];"))[:4] == [
        INPUT[i] for i in (1, 0, 3, 2)
    ]


def test_lanes_exchange_registers(machine: HostMachine) -> None:
    assert words(run(machine, "result = __shfl_sync(0xffffffffu, thread, 5);")) == [
        i // 32 * 32 + 5 for i in range(128)
    ]


def test_copies_land_after_their_wait(machine: HostMachine) -> None:
    found = words(run(machine, COPY + WAIT + "__syncthreads();\nresult = words[thread ^ 64];"))
    assert found == [INPUT[thread ^ 64] for thread in range(THREADS)]
    # nothing is read where the source is not inside
    beyond = COPY.replace("input + thread, true", "input + (1 << 20), thread < 0")
    assert words(run(machine, beyond + WAIT + "result = words[thread];")) == [0] * THREADS


def test_blocks_exchange_words_by_atomics_and_fences(machine: HostMachine) -> None:
    found = words(run(machine, exchange(), grid=2, workspace_bytes=1024))
    assert sorted((found[0], found[128])) == [0, 7]


def test_boxes_are_swizzled_and_filled_with_zeros(machine: HostMachine) -> None:
    found = words(
        run(machine, BARRIER + BOX + "ptx::barrier_wait(barrier, 0);\nresult = words[thread];", tensor=TENSOR)
    )
    # a row of 64 bytes has four chunks of four words; two rows fill a line of 128 bytes, which permutes them
    assert found == [
        INPUT[row * 16 + (chunk ^ row // 2 % 4) * 4 + i] for row in range(8) for chunk in range(4) for i in range(4)
    ]
    outside = BOX.replace("barrier, 0, 0", "barrier, 16, 36")
    found = words(
        run(machine, BARRIER + outside + "ptx::barrier_wait(barrier, 0);\nresult = words[thread];", tensor=TENSOR)
    )
    for row in range(8):
        chunks = [found[row * 16 + chunk * 4 : row * 16 + chunk * 4 + 4] for chunk in range(4)]
        whole = [word for chunk in range(4) for word in chunks[chunk ^ row // 2 % 4]]
        # from column 16 of 32 and row 36 of 40 on
        assert whole == (INPUT[(36 + row) * 16 + 8 : (37 + row) * 16] + [0] * 8 if row < 4 else [0] * 16)


def swizzled(rows: list[list[int]]) -> list[int]:
    """Rows of 16 words as they lie in shared memory: two fill a line of 128 bytes, which permutes their chunks."""
    return [row[(chunk ^ r // 2 % 4) * 4 + i] for r, row in enumerate(rows) for chunk in range(4) for i in range(4)]


def test_blocks_of_a_cluster_share_boxes(machine: HostMachine) -> None:
    body = SHARED_BARRIERS + FIRST_BOX + RELEASE + SECOND_BOX + END
    rows = [INPUT[row * 16 : row * 16 + 16] for row in range(8)]
    first, second = swizzled(rows), swizzled([row[8:] + [0] * 8 for row in rows])
    expected = [(a + b) % 2**32 for a, b in zip(first, second, strict=True)]
    for seed in range(4):
        assert words(run(machine, body, grid=4, cluster=2, tensor=TENSOR, seed=seed)) == expected * 4


def test_each_block_of_a_cluster_has_its_own_shared_memory(machine: HostMachine) -> None:
    body = STAGE.replace("input[thread]", "blockIdx.x * 1000 + thread") + "ptx::sync_cluster();\n"
    found = words(run(machine, body + "result = words[thread ^ 64];", grid=4, cluster=2))
    assert found == [block * 1000 + (thread ^ 64) for block in range(4) for thread in range(THREADS)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            UNSHARED_BARRIERS + FIRST_BOX + END,
            "is not an initialised barrier|a barrier is missing: uses a barrier .* thread 0 of its block [01] init",
        ),
        (
            UNSHARED_BARRIERS + RELEASE + END,
            "is not an initialised barrier|a barrier is missing: uses a barrier .* thread 0 of its block [01] init",
        ),
        (
            SHARED_BARRIERS.replace("ptx::barrier_init_fence();", "") + RELEASE + END,
            "whose initialisation no fence made visible",
        ),
        # the second box needs the threads of both blocks to be done with the first
        (
            (SHARED_BARRIERS + FIRST_BOX + SECOND_BOX + END).replace("ptx::barrier_wait(empty, 0);", ""),
            "a barrier is missing: writes .* of dynamic shared memory|a copy that is still in flight",
        ),
        (
            (SHARED_BARRIERS + FIRST_BOX + RELEASE + SECOND_BOX + END)
            .replace("2 * ", "")
            .replace("(empty, block)", "(empty)")
            .replace("block < 2", "block < 1"),
            "a barrier is missing: writes .* of dynamic shared memory of another block|a copy that is still in flight",
        ),
        (SHARED_BARRIERS + FIRST_BOX + "if (self == 0) { " + RELEASE + "}\n" + SECOND_BOX + END, "deadlock"),
        (SHARED_BARRIERS + FIRST_BOX.replace("full, 3", "full, 1") + END, "deadlock"),
        (SHARED_BARRIERS + FIRST_BOX.replace("full, 3", "full, 5") + END, "a copy to blocks 0x5 of a cluster of 2"),
        (SHARED_BARRIERS + RELEASE.replace("empty, block", "empty, 2") + END, "block 2 of a cluster of 2"),
        # a block must not end while the other arrives at its barriers or copies to its shared memory
        (
            SHARED_BARRIERS + FIRST_BOX + RELEASE,
            "block [01] of the cluster(, which has ended| ends, and thread .* uses its shared memory)",
        ),
        (
            SHARED_BARRIERS + "if (thread == 0 && self == 0) ptx::multicast_box(base, &map, full, 3, 0, 0);\n",
            "which has ended|in flight|block [01] of the cluster ends, and (thread|a tensor copy)",
        ),
        (
            SHARED_BARRIERS + "if (thread == 0 && self == 0) ptx::multicast_box(base, &map, full, 3, 0, 0);\n" + END,
            "a block ends while the copy of kernel.cpp:.* in flight|ends, and a tensor copy uses its shared memory",
        ),
        (
            STAGE + "if (blockIdx.x == 0) ptx::sync_cluster();\nresult = words[thread ^ 64];",
            "reads byte .*(which nobody wrote, at|thread .* of its block 1 writes it at) kernel.cpp",
        ),
    ],
)
def test_defects_within_a_cluster_are_found(machine: HostMachine, body: str, reason: str) -> None:
    for seed in range(3):
        with pytest.raises(HostFault, match=reason):
            run(machine, body, grid=2, cluster=2, tensor=TENSOR, seed=seed)


def test_launches_that_are_no_clusters_are_refused(machine: HostMachine) -> None:
    with pytest.raises(HostFault, match="a grid of 3 blocks is not made of clusters of 2"):
        run(machine, "", grid=3, cluster=2)
    with pytest.raises(HostFault, match="a cluster of blocks needs sm_90"):
        run(machine, "", grid=2, cluster=2, arch="sm_80")


def test_products_are_there_after_their_wait(machine: HostMachine) -> None:
    body = BARRIER + BOX + "ptx::barrier_wait(barrier, 0);\nptx::wgmma_fence();\n" + PRODUCT
    ones = b"\x00\x3c" * 2048
    early = words(run(machine, body + "result = u32(sums[0]);\nptx::wgmma_wait();", tensor=TENSOR, content=ones))
    assert 16 not in early
    found = words(run(machine, body + "ptx::wgmma_wait();\nresult = u32(sums[0]);", tensor=TENSOR, content=ones))
    assert found == [16] * THREADS


def test_a_variable_that_nobody_sets_is_not_zero(machine: HostMachine) -> None:
    found = words(run(machine, "u32 a[4]; if (thread > 1000) a[1] = input[thread]; result = a[lane & 3];"))
    assert 0 not in found


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            STAGE + "result = words[thread ^ 64];",
            "(reads byte .*, which nobody wrote, at|a barrier is missing: reads .* at) kernel.cpp:10",
        ),
        (STAGE + "result = words[thread ^ 1];", "which nobody wrote|a barrier is missing: reads"),
        (
            STAGE + "__syncthreads();\nresult = words[thread ^ 64];\nwords[thread] = 0;",
            "a barrier is missing: .* at kernel.cpp:1[12], and thread .* it at kernel.cpp:1[12]",
        ),
        ("words[thread / 2] = 1;", "a barrier is missing: writes .* writes it at kernel.cpp:9"),
        ("result = words[thread];", r"reads byte \d+ of dynamic shared memory, which nobody wrote, at kernel.cpp:9"),
        ("words[thread + 1000] = 1;", r"4 bytes at byte 4\d+ of 4096 of dynamic shared memory, at kernel.cpp:9"),
        ("if (thread == 1) *reinterpret_cast<u32*>(shared + 2) = result;", "not aligned to 4|a misaligned address"),
        ("u32 a[4]; ptx::ldmatrix_x4(a, base + 8);", "shared address 0x808 is not aligned to 16 bytes"),
        ("u32 a[4]; ptx::ldmatrix_x4(a, base + 4096);", "16 bytes at byte 4096 of 4096"),
        (
            "u32 a[4], b[2] = {}; s32 d[4] = {}; ptx::ldmatrix_x4(a, base); ptx::Mma<s8>::run(d, a, b);",
            "multiplies shared memory that nobody wrote",
        ),
        (COPY + "ptx::cp_async_commit();\nresult = words[thread];", "writes it at kernel.cpp:9"),
        (COPY + "ptx::cp_async_wait<0>();\nresult = words[thread];", "a copy that is still in flight"),
        (COPY + WAIT + "result = words[thread ^ 64];", "which nobody wrote|a barrier is missing|in flight"),
        ("if (warp) __syncthreads();", "deadlock: 32 threads ended, 96 threads of warp|deadlock: 32 threads"),
        (
            "if (lane) __syncwarp();",
            "deadlock: 4 threads ended, 31 threads of warp 0 wait for __syncwarp at kernel.cpp:9",
        ),
        (
            "u32 a[4]; if (lane) ptx::ldmatrix_x4(a, base); else __shfl_sync(0xffffffffu, 1, 0);",
            "a warp's lanes differ",
        ),
        ("result = input[thread + 1000];", r"reads 4 bytes at byte 4\d+ of input, which has 4096, at kernel.cpp:9"),
        ("result = input[thread - 1];", "reads 4 bytes at byte -4 of input"),
        ("const_cast<u32*>(input)[thread] = 1;", "writes to input"),
        ("output[thread] = 1;", "for the second time"),
        ("if (thread == 5) return;", "4 of 512 bytes of output were not written, the first at byte 20"),
        ("while (blockIdx.x == 0) __threadfence();", "does not end"),
        (
            "result = u32(thread + 0x7fffffff);",
            "an overflow, a shift, an index beyond an array or a misaligned address, at kernel.cpp",
        ),
        ("u32 a[4] = {}; result = a[thread];", "an overflow, a shift, an index beyond an array"),
        ("*reinterpret_cast<u32*>(8) = 1;", "writes 4 bytes at byte"),
    ],
)
def test_defects_are_found(machine: HostMachine, body: str, reason: str) -> None:
    with pytest.raises(HostFault, match=reason):
        run(machine, body)


def test_instructions_that_an_older_device_lacks_are_refused(machine: HostMachine) -> None:
    with pytest.raises(HostFault, match=r"cp\.async at kernel\.cpp:9 needs sm_80"):
        run(machine, COPY, arch="sm_75")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (exchange(fence=""), "did not make visible by __threadfence"),
        (exchange(acquire=""), "with no __threadfence after the atomic"),
        (exchange(read="result = workspace[64 + (1 - blockIdx.x) * 64];"), "perhaps from a stale first-level cache"),
        (exchange(read="result = workspace[5];"), "word 5 of workspace, which nobody wrote"),
        ("if (thread == 0) workspace[5] = 1;", "writes word 5 of workspace .* did not make visible"),
        ("workspace[blockIdx.x] = 1;", "a barrier is missing: writes word [01] of workspace"),
    ],
)
def test_defects_between_blocks_are_found(machine: HostMachine, body: str, reason: str) -> None:
    with pytest.raises(HostFault, match=reason):
        run(machine, body, grid=2, workspace_bytes=1024)


def test_a_counter_that_stays_is_seen_by_the_next_launch(machine: HostMachine) -> None:
    """A kernel with a workspace is launched twice; here the second launch exchanges nothing."""
    found = words(run(machine, exchange().replace("workspace[0] = 0", "result = 1"), grid=2, workspace_bytes=1024))
    assert (found[0], found[128]) == (0, 0)


def test_registers_that_nobody_gives_up_are_waited_for(machine: HostMachine) -> None:
    give, take = "ptx::release_registers<24>();", "ptx::claim_registers<240>();"
    run(machine, f"if (warp < 4) {{ {give} }} else {{ {take} }}", threads=384)
    with pytest.raises(HostFault, match=r"deadlock: .* wait for registers at kernel\.cpp:9"):
        run(machine, take, threads=384)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            BARRIER + BOX + "result = words[thread];",
            "a copy that is still in flight|which nobody wrote|a barrier is missing",
        ),
        (
            BARRIER + BOX.replace("1024", "512") + "ptx::barrier_wait(barrier, 0);\nresult = words[thread];",
            "more bytes|in flight|deadlock",
        ),
        (
            BARRIER + BOX.replace("1024", "2048") + "ptx::barrier_wait(barrier, 0);",
            "128 threads .* wait for a barrier|deadlock",
        ),
        (
            BARRIER + BOX + "ptx::barrier_wait(barrier, 1);\nresult = words[thread];",
            "in flight|which nobody wrote|a barrier is missing",
        ),
        (BARRIER.replace("ptx::barrier_init_fence();", "") + BOX, "whose initialisation no fence made visible"),
        (
            BARRIER.replace("__syncthreads();", "") + "ptx::barrier_wait(barrier, 1);",
            "is not an initialised barrier|a barrier is missing",
        ),
        (BARRIER + BOX.replace("base,", "base + 64,"), "not aligned to 128 bytes"),
        (BARRIER + BOX.replace("barrier, 0, 0", "barrier, 0, 0, 0"), "a copy of a box of 3 axes"),
        (
            BARRIER + "ptx::barrier_arrive(barrier);\nptx::barrier_wait(barrier, 0);\nresult = u32(place);",
            "reads byte .*, a barrier",
        ),
        ("ptx::release_registers<248>();", "setmaxnreg.dec from 240 to 248"),
        (BARRIER + BOX + "ptx::barrier_wait(barrier, 0);\n" + PRODUCT + "ptx::wgmma_wait();", "no wgmma.fence"),
        (
            BARRIER + BOX + "ptx::barrier_wait(barrier, 0);\nptx::wgmma_fence();\n" + PRODUCT,
            "ends with products that it did not wait for",
        ),
        (
            BARRIER
            + BOX
            + "ptx::barrier_wait(barrier, 0);\nptx::wgmma_fence();\n"
            + PRODUCT
            + "sums[0] = 0;\nptx::wgmma_wait();",
            "accumulators were written before the wait",
        ),
        (
            BARRIER + STAGE + "__syncthreads();\nptx::wgmma_fence();\n" + PRODUCT + "ptx::wgmma_wait();",
            "no fence between the threads' and the engines' accesses",
        ),
    ],
)
def test_defects_of_asynchronous_instructions_are_found(machine: HostMachine, body: str, reason: str) -> None:
    with pytest.raises(HostFault, match=reason):
        run(machine, body, tensor=TENSOR)
