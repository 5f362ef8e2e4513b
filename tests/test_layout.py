"""The rules between the parts of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from house.measure import class_names_twice

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {
    package.name: package
    for root in ("protos", "services/*", "tools")
    for package in ROOT.glob(f"{root}/trtmesh/*")
    if package.is_dir() and package.name != "__pycache__"
}
MAY_IMPORT = {
    "v1": set(),
    "kserve": set(),
    "chassis": {"v1"},
    "tokenizer": {"v1", "chassis"},
    "engine": {"v1", "chassis"},
    "router": {"v1", "kserve", "chassis"},
    "client": {"v1", "chassis"},
    "cli": {"v1", "chassis", "client", "router", "tools"},
    "tools": {"v1", "kserve", "chassis", "client", "tokenizer", "engine", "router", "cli"},
}
COMPOSES = {
    "router/trtmesh/router/__main__.py": {"tokenizer"},
    "cli/trtmesh/cli/one_process.py": {"engine"},
}
"""What starts a process may put services of other packages into it: a tokenizer into a router, an engine beside it."""

ROOMS = {
    "chassis": (
        "service",
        "process_facts",
        "metrics_endpoint",
        "process_metrics",
        "probe",
        "in_memory",
        "http_server",
        "grpc",
        "channels",
        "tls",
        "connection_settings",
        "settings",
        "health",
        "rpc",
        "peft_adapter",
        "connecting",
        "tokenizer_loading",
        "safetensors_header",
        "parsing",
        "layer_patterns",
        "http_input",
        "error_wire",
        "config_file",
        "bearer",
        "addresses",
        "adapter_content",
        "stopping",
        "stop_texts",
        "logs",
        "http2",
        "fingerprint",
        "model_dir",
        "revisions",
        "receipts",
        "errors",
        "block_hashes",
        "vocabulary",
        "validation",
        "tasks",
        "spellings",
        "resting_file",
        "reflection",
        "progress",
        "panics",
        "forwarding",
        "frozen",
        "number_lists",
        "tracing",
        "metrics",
        "quoting",
        "log_prob_sums",
        "json_text",
        "fair",
        "environment",
        "device_names",
        "cores",
        "allocator",
    ),
    "tokenizer": (
        "__main__",
        "service",
        "settings",
        "router_stream",
        "decoding",
        "encoding",
        "vocabulary",
        "chat",
        "detokenizers",
        "defaults",
        "conversion",
        "metrics",
    ),
    "engine": (
        "__main__",
        "gateways",
        "service",
        "settings",
        "backends",
        "adapters",
        "scheduling",
        "handoff",
        "admission",
        "guides",
        "ledger",
        "adapter_store",
        "backend",
        "kv_memory",
        "model_fingerprint",
    ),
    "engine.scheduling": (
        "handoffs",
        "scheduler",
        "prefixes",
        "sequence",
        "leases",
        "blocks",
        "adapter_slots",
    ),
    "engine.backends.tensorrt_llm": (
        "backend",
        "sequences",
        "arguments",
        "adapters",
        "calls",
        "handoff",
        "errors",
        "fields",
        "details",
        "adapter_folders",
        "adapter_layers",
        "kv_events",
        "load",
        "library",
        "model_files",
        "settings",
    ),
    "engine.backends.torch": (
        "backend",
        "follower",
        "loading",
        "engine",
        "beams",
        "decoding",
        "drafts",
        "cuda",
        "accelerator",
        "cpu",
        "devices",
        "parallel",
        "compute",
        "sequence",
        "sampling",
        "guided",
        "model",
        "preparation",
        "fields",
        "settings",
        "memory",
    ),
    "chassis.grpc": (
        "server",
        "client",
        "large_message",
        "messages",
        "metadata",
        "compression_settings",
    ),
    "engine.handoff": (
        "fetch_server",
        "handoffs",
        "receive_run",
        "send_run",
        "fetch",
        "own_kv",
        "leases",
        "metrics",
        "receive_machine",
        "send_machine",
        "parts",
        "transports",
        "checksums",
        "copying",
        "messages",
        "descriptor",
        "identity",
        "block_plan",
        "lease",
        "settings",
    ),
    "router": (
        "__main__",
        "router",
        "gauges",
        "settings",
        "doors",
        "movement",
        "requests",
        "handoffs",
        "hedging",
        "admission",
        "canary",
        "receipts",
        "fleet",
        "recorder",
        "line_file",
        "tracing",
        "streams",
        "tokenizers",
        "links",
        "adapters",
        "kv_index",
        "placement",
        "callers",
        "values",
        "metrics",
    ),
    "router.doors": ("admin", "native", "openai", "triton", "guard", "http", "generation"),
    "router.doors.openai": (
        "door",
        "template_answers",
        "texts",
        "responses",
        "response_items",
        "chat",
        "completions",
        "requested",
        "errors",
        "served",
        "answer",
        "log_probs",
        "tools",
        "fields",
        "answer_parser",
        "call_formats",
        "answer_parts",
        "settings",
    ),
    "router.doors.triton": (
        "triton",
        "http",
        "grpc",
        "server",
        "generations",
        "bls_loop",
        "token_ids",
        "engines",
        "metrics",
        "statistics",
        "models",
        "calls",
        "answers",
        "templates",
        "tensors",
        "releases",
        "unmerged",
        "settings",
        "quoted",
    ),
    "router.handoffs": ("item_handoffs", "client_halves", "table", "live_handoff", "machine"),
}
"""Files and folders of a package from the top down: imports go to the same entry or to later ones."""

SMALL_LINES = 80
SMALL_IDEAS = {
    "engine.backends.simulated.batch": "the lists by which a step costs no loop",
    "engine.backends.tensorrt_llm.adapter_folders": "locks, which a killed worker loses",
    "engine.backends.tensorrt_llm.errors": "the library's errors in words of the mesh",
    "engine.backends.tensorrt_llm.load": "the library's rows of statistics",
    "engine.backends.torch.cuda.choice": "a choice, which tests make without kernels",
    "engine.backends.torch.cuda.invariant_device": "a device, like its neighbour",
    "engine.backends.torch.cuda.kernels.block_copies": "a kernel, like its neighbours",
    "engine.backends.torch.devices": "a device's name, before CUDA is used",
    "engine.backends.torch.drafts.patience": "a thread that may hang",
    "engine.backends.torch.fields": "what requests may set",
    "engine.backends.torch.guided.structural_tags": "a notation of its own",
    "engine.backends.torch.model.rope": "what would couple the requests of a batch",
    "engine.backends.torch.sampling.mask_time": "who waits for whose grammar",
    "engine.backends.torch.sampling.rejection": "a rule with the reasons why it is right",
    "engine.gateways.choice": "imports only the contracts that settings choose",
    "engine.gateways.trtllm.tokenizer_files": "what gateways may download",
    "router.doors.openai.template_answers": "what waits for a tokenizer, unlike its neighbours",
    "tokenizer.defaults": "what a model recommends, of which no text depends",
    "router.__main__": "a program, of which a mesh in one process is another",
    "router.adapters.writing": "a queue with a life of its own",
    "router.doors.guard": "what every gRPC server of the router asks",
    "router.doors.http.load_header": "a protocol of balancers",
    "router.doors.http.origins": "which pages of browsers may ask",
    "router.doors.openai.completions": "an endpoint",
    "router.doors.openai.answer_parts": "the words between the parser and the endpoints",
    "router.doors.triton.templates.ensemble": "a template, like its neighbours",
    "router.doors.triton.token_ids": "what clients send and an engine would refuse",
    "router.doors.triton.triton": "the door as a whole",
    "router.doors.triton.unmerged": "tokens taken apart for clients that count responses",
    "router.fleet.link_local": "a rule against strangers, to be read alone",
    "tokenizer.conversion": "a process of its own",
    "tokenizer.detokenizers.choice": "the fastest family that is right",
}
"""Small modules with one importer, and what makes each an idea of its own."""

MODULES = {
    "trtmesh." + ".".join(file.relative_to(package.parent).with_suffix("").parts): file
    for name, package in PACKAGES.items()
    if name not in ("v1", "kserve")
    for file in package.rglob("*.py")
    if file.name != "__init__.py"
}


def imported_modules(file: Path, *, for_types: bool = True) -> list[str]:
    """The absolute names of all modules imported by `file`, `from a import b` as a.b; without `for_types` only those
    imported at run time."""
    return [name for name, is_for_types in _imports(file) if for_types or not is_for_types]


@cache
def _imports(file: Path) -> list[tuple[str, bool]]:
    """Imported modules, and whether they are imported for types."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return [(name, _is_for_types(each)) for each in body for name in _imported_by(each)]


def _imported_by(node: ast.AST) -> Iterator[str]:
    """Modules that a statement, or one in it, imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"there is a relative import of {node.module}"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    # Only statements: to visit expressions too takes many times as long.
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, block, None) or ():
            yield from _imported_by(each)


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_every_package_has_an_import_rule() -> None:
    assert set(PACKAGES) == set(MAY_IMPORT)


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_packages_import_only_what_they_may(name: str) -> None:
    allowed = MAY_IMPORT[name] | {name}
    broken = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in PACKAGES[name].rglob("*.py")
        for module in imported_modules(file)
        if module.startswith("trtmesh.")
        and module.split(".")[1] not in allowed | COMPOSES.get("/".join(file.parts[-4:]), set())
    ]
    assert broken == []


def imports_of(module: str, *, for_types: bool = True) -> set[str]:
    """Modules of the project imported by a module, `from a import b` as a or a.b."""
    names = set(imported_modules(MODULES[module], for_types=for_types))
    owners = {name.rpartition(".")[0] for name in names}
    return ((names | owners) & MODULES.keys()) - {module}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_downwards_only(package: str) -> None:
    depth = len(package.split(".")) + 2
    rank = {f"trtmesh.{package}.{room}": place for place, room in enumerate(ROOMS[package])}

    def rank_of(module: str) -> int | None:
        return rank.get(".".join(module.split(".")[:depth]))

    upward = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported in imported_modules(MODULES[module])
        if (above := rank_of(imported)) is not None
        and (below := rank_of(module)) is not None
        and above < below
    ]
    assert upward == []


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_every_room_has_its_place(package: str) -> None:
    """A new file or folder of these packages needs a place in the order."""
    name, *inner = package.split(".")
    folder = PACKAGES[name].joinpath(*inner)
    inside = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")}
    assert inside - {"__init__", "__pycache__"} == set(ROOMS[package])


def test_no_two_public_classes_of_a_package_share_a_name() -> None:
    twice = class_names_twice(ROOT)
    assert twice.keys() == PACKAGES.keys() - {"v1", "kserve"}
    assert {package: names for package, names in twice.items() if names} == {}


@pytest.mark.parametrize(
    "room",
    [
        *("client", "router", "tokenizer"),
        *("engine.backends", "engine.gateways", "engine.handoff", "engine.scheduling"),
        "engine.service",
    ],
)
def test_small_module_with_one_importer_is_an_idea_of_its_own(room: str) -> None:
    """A module that exists for its only importer is part of it."""
    importers = Counter(name for module in MODULES for name in imports_of(module))
    slivers = {
        module.removeprefix("trtmesh.")
        for module, file in MODULES.items()
        if module.startswith(f"trtmesh.{room}.")
        and importers[module] == 1
        and len(file.read_text(encoding="utf-8").splitlines()) < SMALL_LINES
    }
    assert slivers - SMALL_IDEAS.keys() == set()


def test_no_imports_form_a_circle() -> None:
    waiting = {module: imports_of(module) for module in MODULES}
    while free := [module for module, needs in waiting.items() if not needs & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert sorted(waiting) == []


def test_scheduler_and_simulation_need_no_arrays() -> None:
    """Nor does what they import: so every backend can run on the scheduler, and `replay` where a router can."""
    reached, new = set[str](), {each for each in MODULES if "engine.scheduling." in each}
    new.add("trtmesh.engine.backends.simulated.engine")
    while new:
        reached |= new
        new = {name for each in new for name in imports_of(each, for_types=False)} - reached
    loaded = {
        name.split(".")[0]
        for each in reached
        for name in imported_modules(MODULES[each], for_types=False)
    }
    assert loaded & {"torch", "numpy"} == set()


@pytest.mark.parametrize(("room", "others"), [("fair", ()), ("http2", ("fair",))])
def test_rooms_that_could_be_libraries_import_nothing_else_of_ours(
    room: str, others: tuple[str, ...]
) -> None:
    allowed = tuple(f"trtmesh.chassis.{name}." for name in (room, *others))
    foreign = [
        f"{module} imports {imported}"
        for module in MODULES
        if module.startswith(f"trtmesh.chassis.{room}.")
        for imported in imported_modules(MODULES[module])
        if imported.startswith("trtmesh.") and not imported.startswith(allowed)
    ]
    assert foreign == []


def test_doors_share_out_nothing() -> None:
    """A door is handed messages that were admitted, and sees no size, no budget and no turn."""
    known = {
        imported.rpartition(".")[2]
        for module in MODULES
        if module.startswith("trtmesh.router.doors.")
        and not module.startswith("trtmesh.router.doors.http.")
        for imported in imported_modules(MODULES[module])
        if imported.startswith("trtmesh.chassis.fair.")
    }
    assert known <= {"ReceivedMessage", "origin_of"}


def test_policies_of_the_router_know_no_wire() -> None:
    importers = {
        module
        for module in MODULES
        if module.startswith("trtmesh.router.")
        for imported in imported_modules(MODULES[module])
        if imported.startswith("trtmesh.chassis.http2.")
    }
    assert importers == set()


def importers_of(package: str, prefix: str) -> set[str]:
    """Files and folders of a package that import modules whose names begin so."""
    return {
        file.relative_to(PACKAGES[package]).parts[0]
        for file in PACKAGES[package].rglob("*.py")
        for module in imported_modules(file)
        if module.startswith(prefix)
    }


def test_few_commands_import_the_router() -> None:
    """A stack's settings name policies, `keys` writes the file of callers, the process of `up --one-process` joins all
    services, `replay` runs the router's placement and the engine's scheduler, `import-triton` checks against the
    Triton door, and the table of all metrics is made of every service's. Other commands talk to a router."""
    joins = {"one_process.py"}
    assert importers_of("cli", "trtmesh.router.") == {"keys.py", "mesh_settings.py", *joins}
    assert importers_of("cli", "trtmesh.engine.") == joins
    importers = {"checkup", "fleet_replay", "metrics.py", "replay.py", "triton_import"}
    assert importers_of("tools", "trtmesh.router.") == importers
    assert importers_of("tools", "trtmesh.engine.") == {"checkup", "fleet_replay", "metrics.py"}


def test_few_commands_import_the_tools() -> None:
    """`up` serves an imported repository; the application imports a command of the tools only to run it."""
    assert importers_of("cli", "trtmesh.tools.") == {"supervisor.py"}


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        (
            "torch",
            (
                "engine/backends/torch/",
                "engine/adapters/",
                "engine/backends/tensorrt_llm/details.py",
            ),
        ),
        ("tensorrt_llm", ("engine/backends/tensorrt_llm/library.py",)),
        ("opentelemetry", ("chassis/tracing/otlp.py",)),
    ],
)
def test_only_its_homes_import_a_library(library: str, homes: tuple[str, ...]) -> None:
    importers = [
        file.as_posix()
        for package in PACKAGES.values()
        for file in package.rglob("*.py")
        for module in imported_modules(file)
        if module.split(".")[0] == library
    ]
    assert [each for each in importers if not any(f"/{home}" in each for home in homes)] == []


def test_cli_starts_without_heavy_libraries() -> None:
    heavy = ("torch", "transformers", "tokenizers", "numpy", "opentelemetry")
    program = (
        "import sys; from trtmesh.cli.app import COMMANDS; [each.load() for each in COMMANDS];"
        f" print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_namespace_package_has_no_init_file() -> None:
    """A `trtmesh/__init__.py` in one root would hide the other roots."""
    roots = [ROOT / path for path in PYPROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    assert [root for root in roots if not (root / "trtmesh").is_dir()] == []
    assert [root for root in roots if (root / "trtmesh" / "__init__.py").exists()] == []


def test_every_package_is_typed() -> None:
    untyped = [name for name, path in PACKAGES.items() if not (path / "py.typed").is_file()]
    assert untyped == []


def test_dependencies_are_bounded_above_and_below() -> None:
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    unbounded = [
        requirement
        for group in groups
        for requirement in group
        if "==" not in requirement and not (">=" in requirement and "<" in requirement)
    ]
    assert unbounded == []


def test_every_type_ignore_has_a_reason() -> None:
    """On the same line or in a comment above."""
    mark = "# type: " + "ignore"
    bare = []
    for folder in ("services", "tools", "bench", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            above = ""
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                _, found, behind = line.partition(mark)
                if found and "#" not in behind and not above.lstrip().startswith("#"):
                    bare.append(f"{file.relative_to(ROOT)}:{number}")
                above = line
    assert bare == []


def test_every_dependency_is_pinned_for_ci() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    # The wheels need a CUDA machine; CI has none.
    installed = (extras[extra] for extra in extras if extra != "tensorrt-llm")
    needed = [*project["dependencies"], *chain.from_iterable(installed)]
    names = {re.split(r"[\[>=]", requirement)[0].lower() for requirement in needed}
    assert names - pinned == set()
