"""What ``kvplugin doctor`` asks of the vLLM that is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import entry_points, packages_distributions, version

from kvplugin.checks import Check, Status
from kvplugin.vllm.ledger import CHECKED_VERSIONS, POINTS, Build, problem, release
from kvplugin.vllm.settings import DISABLE_VARIABLES, disabled_by_environment

PLUGIN_NAME = "kvplugin"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
ALLOW_VARIABLE = "VLLM_PLUGINS"


def engine_checks() -> list[Check]:
    """Version, registration, platform and ledger; a vLLM that cannot be imported is one failed check."""
    # The report is the only thing to print; vLLM logs to standard output while it is imported.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm

        found = f"{vllm.__version__} ({_distribution_of('vllm')})"
        build = _build_here()
    except Exception as error:
        return [Check("vllm", Status.FAILED, f"cannot be imported: {error}", "repair the vLLM installation")]
    return [
        _version_check(vllm.__version__, found, build),
        *plugin_checks(),
        *_platform_checks(),
        *_ledger_checks(vllm.__version__, build),
    ]


def _build_here() -> Build:
    """Whose rows of the ledger count; on a platform that the plugin does not serve, those of every build."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Build.CPU
    return Build.GPU if current_platform.is_cuda() else Build.ANY


def _version_check(version: str, found: str, build: Build) -> Check:
    checked = CHECKED_VERSIONS.get(build, ())
    if release(version) not in map(release, checked):
        return Check("vllm", Status.NOTE, found, f"not among the checked versions: {', '.join(checked) or 'none'}")
    if build is Build.GPU:
        return Check("vllm", Status.NOTE, found, "checked on CPU tensors, not on a GPU: docs/compatibility.md")
    return Check("vllm", Status.OK, found, "")


def _distribution_of(module: str) -> str:
    """``name version`` of the distribution that provides a module; several providers are all named."""
    names = packages_distributions().get(module, [])
    return ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(names)) or "unknown distribution"


def plugin_checks() -> Iterator[Check]:
    """Registration, as the environment has it; imports no vLLM."""
    missing = [group for group in PLUGIN_GROUPS if PLUGIN_NAME not in entry_points(group=group).names]
    yield Check(
        "plugin discovered",
        Status.FAILED if missing else Status.OK,
        f"missing from {', '.join(missing)}" if missing else ", ".join(PLUGIN_GROUPS),
        "install kvplugin into the environment that runs vLLM: pip install kvplugin" if missing else "",
    )
    allowed = os.environ.get(ALLOW_VARIABLE)
    admitted = allowed is None or PLUGIN_NAME in [name.strip() for name in allowed.split(",")]
    yield Check(
        "plugin allowed",
        Status.OK if admitted else Status.FAILED,
        f"{ALLOW_VARIABLE} is {'not set' if allowed is None else repr(allowed)}",
        "" if admitted else f"add {PLUGIN_NAME} to {ALLOW_VARIABLE}, or unset it",
    )
    off = disabled_by_environment()
    yield Check(
        "plugin enabled",
        Status.NOTE if off else Status.OK,
        "switched off by the environment" if off else "yes",
        f"unset {' and '.join(DISABLE_VARIABLES)} to switch it on" if off else "",
    )


def _platform_checks() -> Iterator[Check]:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from kvplugin.vllm.backend_names import ALIAS_NAME, BACKEND_NAME

    load_general_plugins()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours = type(current_platform).__module__.startswith("kvplugin.")
    yield Check(
        "plugin active",
        Status.OK if ours else Status.NOTE,
        f"platform {type(current_platform).__qualname__}",
        "" if ours else "the plugin acts on vLLM's CPU and CUDA platforms; elsewhere vLLM runs as without it",
    )
    names = AttentionBackendEnum.__members__
    for name in (BACKEND_NAME, ALIAS_NAME):
        member = names.get(name)
        path = member.get_path() if member is not None and (member.value or member.is_overridden()) else None
        yield Check(
            f"backend {name}",
            Status.OK if path is not None and path.startswith("kvplugin.") else Status.NOTE,
            path or "not registered",
            "" if path else "registered where the plugin is active",
        )


def _ledger_checks(version: str, build: Build) -> Iterator[Check]:
    for point in POINTS:
        if not point.is_taken_in(build, version):
            continue
        wrong = problem(point)
        yield Check(
            f"{point.kind} {point.target.partition(':')[2]}",
            Status.FAILED if wrong else Status.OK,
            wrong or "present",
            f"use vLLM {' or '.join(CHECKED_VERSIONS.get(build, ()))}" if wrong else "",
        )
