"""The checks of the set-up, each from facts of a machine that is not there."""

import os
from pathlib import Path

import pytest
import torch

from harness.base.errors import UserError
from harness.machine import setup_checks
from harness.machine.host_limits import cgroup_folders, least_quota, usable_cores
from harness.machine.setup_checks import (
    Check,
    NetworkHardware,
    RankPlacement,
    Versions,
    architecture_check,
    binding_checks,
    cache_checks,
    cores_of,
    free_memory_check,
    known_issue_checks,
    numbers,
    package_checks,
    thread_check,
    transport_check,
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- The report ----------------------------------------------------------------------------------


def test_a_report_lists_fixes_and_ends_with_the_first_fatal_check(capsys):
    checks = [
        Check("Caches", "writable"),
        Check("Threads", "8 on 4 cores", "export OMP_NUM_THREADS=4"),
        Check("Kernels", "none for sm_75", "install another build", fatal=True),
        Check("Disk", "gone", fatal=True),
    ]
    with pytest.raises(
        UserError, match=r"^Kernels: none for sm_75; install another build$"
    ) as stop:
        setup_checks.report("Setup", checks)
    assert stop.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert "Caches   writable" in lines
    assert "Threads  warning: 8 on 4 cores" in lines
    assert "Kernels  ERROR: none for sm_75" in lines
    assert lines[-4:-1] == [
        "What to do:",
        "  Threads: export OMP_NUM_THREADS=4",
        "  Kernels: install another build",
    ]


def test_missing_packages_are_warnings():
    *_, numpy, deepspeed = package_checks({"numpy": "2.4.6", "deepspeed": None})
    assert numpy == Check("numpy", "2.4.6")
    assert deepspeed == Check(
        "deepspeed", "missing", "pip install deepspeed, needed for --enable-deepspeed-flops"
    )


# ---- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "built_for", "runs"),
    [
        ("gfx90a", ["gfx90a", "gfx942"], True),
        ("gfx1036", ["gfx90a", "gfx942"], False),
        ("sm_90", ["sm_80", "sm_90"], True),
        ("sm_90", ["sm_90a"], True),
        ("sm_86", ["sm_80"], True),
        ("sm_75", ["sm_80", "sm_90", "compute_90"], False),
        ("sm_120", ["sm_90", "compute_90"], True),
        ("sm_120", ["sm_90"], False),
        ("sm_90", [], True),
    ],
)
def test_kernels_for_the_gpu(arch, built_for, runs):
    check = architecture_check(arch, built_for)
    assert check.fatal is not runs
    assert arch in check.result or not built_for


def test_memory_used_by_others():
    assert free_memory_check(63 * 2**30, 64 * 2**30).fix is None
    check = free_memory_check(20 * 2**30, 64 * 2**30)
    assert check.result == "20,480 MB of 65,536 MB free"
    assert "other processes" in check.fix


# ---- Cores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "cores", "granted", "environ", "fix"),
    [
        (8, 8, None, {}, None),
        (8, 4, None, {}, "export OMP_NUM_THREADS=4"),
        (8, 8, 2.5, {}, "export OMP_NUM_THREADS=2"),
        (1, 8, None, {"OMP_NUM_THREADS": "1"}, "export OMP_NUM_THREADS=8"),
        (1, 8, None, {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "8"}, None),
    ],
)
def test_threads_against_cores(threads, cores, granted, environ, fix):
    check = thread_check(threads, set(range(cores)), granted, environ)
    assert check.fix == fix
    assert (f"the cgroup grants {granted}" in check.result) is (granted is not None)


def test_limits_of_cgroups(tmp_path):
    """Version 2, with a limit on the job and none on its step; and version 1."""
    for number, (own, files, cores) in enumerate(
        [
            (
                "0::/job_7/step_0\n",
                {"job_7/cpu.max": "400000 100000\n", "job_7/step_0/cpu.max": "max 100000\n"},
                4,
            ),
            ("0::/other\n", {"job_7/cpu.max": "400000 100000\n"}, None),
            (
                "3:cpuset:/x\n2:cpu,cpuacct:/docker\n",
                {
                    "cpu,cpuacct/docker/cpu.cfs_quota_us": "150000\n",
                    "cpu,cpuacct/docker/cpu.cfs_period_us": "100000\n",
                },
                1.5,
            ),
        ]
    ):
        proc, cgroups = tmp_path / f"proc{number}", tmp_path / f"cgroup{number}"
        write(proc / "self/cgroup", own)
        for name, text in files.items():
            write(cgroups / name, text)
            write((cgroups / name).parent / "cpu.stat", "nr_periods 0\n")
        assert least_quota(cgroup_folders("cpu", proc, cgroups)) == cores


def test_lists_of_cores():
    assert cores_of("0-2,8\n") == {0, 1, 2, 8}
    assert cores_of("\n") == set()
    assert numbers({8, 0, 1, 2}) == "0-2,8"
    assert numbers([]) == ""


def test_facts_of_this_process(tmp_path):
    write(tmp_path / "devices/system/node/node0/cpulist", "0-4095\n")
    write(tmp_path / "devices/system/node/node1/cpulist", "4096-8191\n")
    facts = RankPlacement.here(torch.device("cpu"), 3, tmp_path)
    assert (facts.rank, facts.numa_nodes, facts.gpu, facts.gpu_numa_node) == (3, {0}, None, None)
    assert len(facts.cores) == len(usable_cores())


def rank(
    number: int, cores: range, nodes=(0,), gpu_node=None, host="n1", threads=4
) -> RankPlacement:
    gpu = None if gpu_node is None else "cuda:0 AMD Instinct MI250X"
    return RankPlacement(number, host, threads, frozenset(cores), frozenset(nodes), gpu, gpu_node)


def test_bound_ranks():
    facts = [
        rank(0, range(4), gpu_node=0),
        rank(1, range(4, 8), (1,), gpu_node=1),
        rank(2, range(4), host="n2"),
    ]
    checks = binding_checks(facts)
    assert [check.fix for check in checks] == [None, None, None]
    assert checks[0].result == "n1, cores 0-3, NUMA node 0, cuda:0 AMD Instinct MI250X"


def test_ranks_that_share_cores():
    first, second, alone = binding_checks(
        [rank(0, range(6)), rank(1, range(6)), rank(2, range(4), host="n2")]
    )
    assert "shared: 8 threads of 2 ranks on 6 cores" in first.result
    assert first.fix == second.fix == "export OMP_NUM_THREADS=3"
    assert alone.fix is None


def test_a_rank_far_from_its_gpu():
    (check,) = binding_checks([rank(0, range(8), (0, 3), gpu_node=3)])
    assert "its GPU is at NUMA node 3" in check.result
    assert "srun --cpu-bind=cores --gpu-bind=closest" in check.fix


# ---- Transport -----------------------------------------------------------------------------------


@pytest.fixture
def rccl(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 6))


def test_network_of_this_node(tmp_path):
    for name in ("class/net/hsn0", "class/net/lo", "class/infiniband/mlx5_0"):
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path / "ofi/librccl-net.so.0", "")
    network = NetworkHardware.here(tmp_path, f"/nonexistent:{tmp_path / 'ofi'}")
    assert network == NetworkHardware(("hsn0", "lo"), ("mlx5_0",), ("librccl-net.so.0",))


@pytest.mark.parametrize(
    ("nodes", "network", "environ", "result", "fixed"),
    [
        (1, NetworkHardware(), {}, "RCCL 2.26.6 within the node", False),
        (
            2,
            NetworkHardware(("hsn0", "hsn1")),
            {},
            "Slingshot is present (hsn0,hsn1), but no plugin",
            True,
        ),
        (
            2,
            NetworkHardware(("hsn0",), (), ("librccl-net.so",)),
            {},
            "network plugin librccl-net.so",
            False,
        ),
        (
            2,
            NetworkHardware(("hsn0",)),
            {"NCCL_NET": "AWS Libfabric"},
            "network plugin AWS Libfabric",
            False,
        ),
        (2, NetworkHardware(("ib0",), ("mlx5_0",)), {}, "InfiniBand or RoCE (mlx5_0)", False),
        (2, NetworkHardware(("eth0",)), {"NCCL_SOCKET_IFNAME": "eth0"}, "TCP over eth0", False),
    ],
)
def test_transport_of_gpus(rccl, nodes, network, environ, result, fixed):
    check = transport_check("cuda", nodes, network, environ)
    assert result in check.result
    assert bool(check.fix) is fixed
    assert not fixed or "NCCL_SOCKET_IFNAME=hsn0,hsn1" in check.fix


def test_transport_of_cpus():
    assert (
        transport_check("cpu", 2, NetworkHardware(), {"GLOO_SOCKET_IFNAME": "ib0"}).result
        == "gloo, TCP over ib0"
    )


# ---- Caches and versions -------------------------------------------------------------------------


def test_caches_that_cannot_be_written(tmp_path, monkeypatch):
    assert cache_checks({}, tmp_path) == [Check("Caches", "writable")]
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    (check,) = cache_checks({"XDG_CACHE_HOME": "/tmp/cache"}, tmp_path)
    assert check.result == f"not writable: {tmp_path / '.triton'}"
    assert check.fix == "set each to a folder on a local disk: TRITON_CACHE_DIR=/tmp/$USER"


def test_caches_of_miopen(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    (check,) = cache_checks({}, tmp_path)
    assert "MIOPEN_USER_DB_PATH=/tmp/$USER MIOPEN_CUSTOM_CACHE_DIR=/tmp/$USER" in check.fix


@pytest.mark.parametrize(
    ("versions", "environ", "sources"),
    [
        (Versions(), {}, []),
        (Versions((6, 4), "gfx90a"), {}, []),
        (Versions((7, 0), "gfx90a"), {}, ["1327"]),
        (Versions((7, 1), "gfx942"), {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}, []),
        (Versions((7, 2), "gfx942"), {}, ["4084", "6065", "6102"]),
        (Versions((7, 2), "gfx942"), {"PYTORCH_TUNABLEOP_ENABLED": "1"}, ["4084", "6102"]),
        (Versions((7, 2, 1), "gfx90a"), {}, ["6102"]),
        (Versions((7, 2, 2), "gfx90a"), {}, []),
        (Versions((6, 4), "gfx90a", frozenset({"amdsmi"})), {}, ["186516"]),
    ],
)
def test_versions_with_known_issues(versions, environ, sources):
    checks = known_issue_checks(versions, environ)
    assert [check.fix is not None for check in checks] == [True] * len(sources) or [False]
    assert all(
        source in check.result for source, check in zip(sources, checks, strict=bool(sources))
    )


@pytest.mark.parametrize(
    ("rocm", "hip", "numbers", "fix"),
    [
        ("7.2.1", "7.2.26015", (7, 2, 1), "use 7.2.2 or later; the profile"),
        ("7.2.2", "7.2.53210", (7, 2, 2), None),
        (
            None,
            "7.2.53210-671d39a55e",
            (7, 2),
            "use 7.2.2 or later, unless this is one: PyTorch does not tell which",
        ),
    ],
)
def test_the_version_of_rocm_is_as_exact_as_pytorch_tells_it(monkeypatch, rocm, hip, numbers, fix):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "rocm", rocm, raising=False)
    versions = Versions.here(torch.device("cpu"))
    assert versions.rocm == numbers
    fixes = [check.fix for check in known_issue_checks(versions, {}) if "6102" in check.result]
    assert [fix in one for one in fixes] == ([True] if fix else [])
