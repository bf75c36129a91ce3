"""The rules of the house: who may import whom, what a file may be, and that what is installed is what is here."""

import ast
import os
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOOR_1 = {"core", "kernels"}
FLOOR_2 = FLOOR_1 | {"model", "kvtransfer"}
FLOOR_3 = FLOOR_2 | {"prefill", "decode", "router", "deploy"}
COMMANDS = {"cli", "cli_flags", "cli_settings", "cli_access", "cli_doctor"}
FLOOR_4 = {"worker", "llm", "examine", *COMMANDS}

# A part may import itself and these. A folder or file of the root that is not named here is no part of the house.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "kernels": set(),
    "model": FLOOR_1,
    "kvtransfer": FLOOR_1,
    "prefill": FLOOR_2,
    "decode": FLOOR_2,
    "router": {"core"},
    "deploy": {"core"},
    "worker": FLOOR_3,
    "llm": FLOOR_3,
    "cli": FLOOR_3 | FLOOR_4 | {"benchmarks"},
    "cli_flags": {"core"},
    "cli_settings": set(),
    "cli_access": {"router"},
    "cli_doctor": {"core", "deploy", "examine"},
    "examine": FLOOR_3,
    "crossdock": {"core", "llm"},
    "benchmarks": FLOOR_3 | FLOOR_4 | {"crossdock"},
}
TORCH_FREE = {"core", "kvtransfer", "prefill", "decode", "router", "deploy", "crossdock", "benchmarks", *COMMANDS}
WITH_TORCH = (
    *("benchmarks.cpu", "benchmarks.model_export", "benchmarks.gpu", "benchmarks.offline_engine"),
    *("benchmarks.transfer", "kvtransfer.cuda_ipc", "kvtransfer.cuda_memory", "kvtransfer.device_pool"),
    "kvtransfer.nccl_gpu",
)
LOAD_CLIENT = ("bench", "load", "report", "sse_client", "stream_meter", "traces", "workload")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 40
MAX_TEST_LINES = 60


@dataclass(frozen=True)
class Import:
    target: str
    """A module of ours without its leading ``crossdock.`` (alone it is the root), or the top name of a foreign one."""
    is_ours: bool
    is_at_load: bool
    """Runs when the module is imported: it stands in no function, and is not for the type checker alone."""

    @property
    def part(self) -> str:
        return self.target.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One source file, named as in `Import`."""

    path: Path
    name: str

    @property
    def part(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports_below(self.tree, is_at_load=True))

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def _imports_below(self, node: ast.AST, is_at_load: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (absolute_import(alias.name, is_at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.level == 0:
                yield absolute_import(child.module or "", is_at_load)
            elif isinstance(child, ast.ImportFrom):
                yield from self._relative_imports(child, is_at_load)
            else:
                yield from self._imports_below(child, is_at_load and runs_at_load(child))

    def _relative_imports(self, node: ast.ImportFrom, is_at_load: bool) -> Iterator[Import]:
        folder = list(self.path.parent.relative_to(ROOT).parts)
        base = [*folder[: len(folder) + 1 - node.level], *(node.module or "").split(".")]
        for alias in node.names:
            module = ".".join(filter(None, base)) or "crossdock"
            submodule = ".".join(filter(None, [*base, alias.name]))
            yield Import(submodule if submodule in MODULES else module, True, is_at_load)


def absolute_import(dotted: str, is_at_load: bool) -> Import:
    top, _, rest = dotted.partition(".")
    return Import(rest or top, True, is_at_load) if top == "crossdock" else Import(top, False, is_at_load)


def runs_at_load(node: ast.AST) -> bool:
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return not is_for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def checkout_files(pattern: str) -> list[Path]:
    """Files of the checkout, without hidden folders (the environment, caches, git) and what a build leaves."""
    folders = [entry for entry in ROOT.iterdir() if entry.is_dir() and entry.name not in ("build", "dist")]
    visible = [folder for folder in folders if not folder.name.startswith(".")]
    return sorted([*ROOT.glob(pattern), *(path for folder in visible for path in folder.rglob(pattern))])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "crossdock"


SOURCES = [Module(path, module_name(path)) for path in checkout_files("*.py")]
TESTS = [module for module in SOURCES if module.part == "tests"]
MODULES = {module.name: module for module in SOURCES if module.part != "tests"}

each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
each_source = pytest.mark.parametrize("module", SOURCES, ids=lambda module: module.name)


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of the body, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def longer_than(limit: int, modules: list[Module]) -> list[str]:
    return [
        f"{module.name}:{function.lineno} {function.name} has {num_lines(function)} lines"
        for module in modules
        for function in module.functions
        if num_lines(function) > limit
    ]


# --- floors --------------------------------------------------------------------------------------


@each_module
def test_imports_go_only_downward(module: Module) -> None:
    assert module.part in MAY_IMPORT, f"{module.part} has no floor in this house"
    allowed = MAY_IMPORT[module.part] | {module.part}
    assert {found.part for found in module.imports if found.is_ours} <= allowed


def test_imports_form_no_circle() -> None:
    path: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name in done or name not in MODULES:
            return
        path.append(name)
        for found in MODULES[name].imports:
            if found.is_ours and found.is_at_load:
                visit(found.target)
        done.add(path.pop())

    for name in MODULES:
        visit(name)
    assert done == set(MODULES)


@pytest.mark.parametrize(("one", "other"), [("prefill", "decode"), ("model", "kvtransfer"), ("router", "deploy")])
def test_neighbours_do_not_know_each_other(one: str, other: str) -> None:
    assert other not in MAY_IMPORT[one]
    assert one not in MAY_IMPORT[other]


@pytest.mark.parametrize("name", LOAD_CLIENT)
def test_the_load_client_knows_nothing_of_what_it_measures(name: str) -> None:
    assert {found.part for found in MODULES[f"benchmarks.{name}"].imports if found.is_ours} <= {"benchmarks"}


@each_module
def test_torch_is_known_only_where_the_device_is(module: Module) -> None:
    foreign = {found.target for found in module.imports if not found.is_ours}
    has_torch = bool(foreign & {"torch", "transformers", "triton", "accelerate"})
    assert not has_torch or module.part not in TORCH_FREE or module.name.startswith(WITH_TORCH)


@pytest.mark.parametrize("entry", ["crossdock", "crossdock.router.app", "crossdock.deploy.launch", "crossdock.cli"])
def test_router_launcher_and_commands_start_without_torch(entry: str) -> None:
    script = f"import {entry}, sys; print(sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    paths = {**os.environ, "PYTHONPATH": str(ROOT / ".typing")}
    ran = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, env=paths)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_the_root_package_loads_nothing() -> None:
    assert [found.target for found in MODULES["crossdock"].imports if found.is_at_load] == ["typing"]


# --- what is installed ---------------------------------------------------------------------------


def test_kernels_is_no_regular_package_so_that_transformers_does_not_take_it_for_its_own() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_folder_of_the_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {module.path.parent.relative_to(ROOT) for module in MODULES.values()}
    packages = {".".join(["crossdock", *folder.parts]) for folder in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


def test_every_folder_but_kernels_is_a_regular_package() -> None:
    folders = {module.path.parent for module in MODULES.values()} - {ROOT / "kernels"}
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_page_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["package-data"]
    folders = {path.parent.relative_to(ROOT) for path in checkout_files("*.html") if "tests" not in path.parts}
    assert folders
    assert all("*.html" in data[".".join(["crossdock", *folder.parts])] for folder in folders)


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = [re.split(r"[><=\[;]", requirement)[0].replace("-", "_").lower() for requirement in requirements]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert set(names) <= {name.replace("-", "_").lower() for name, _ in pins}


# --- size and style ------------------------------------------------------------------------------


@each_source
def test_no_file_is_long(module: Module) -> None:
    num_lines_of_file = len(module.source.splitlines())
    assert num_lines_of_file <= MAX_FILE_LINES


def test_functions_are_short() -> None:
    modules = [module for module in MODULES.values() if module.part != "kernels"]
    assert longer_than(MAX_FUNCTION_LINES, modules) == []
    assert statistics.median(num_lines(function) for module in modules for function in module.functions) < 10


def test_tests_are_short() -> None:
    assert longer_than(MAX_TEST_LINES, TESTS) == []


@each_module
def test_a_module_opens_with_what_it_promises(module: Module) -> None:
    assert ast.get_docstring(module.tree)


@each_source
def test_names_say_what_is_inside(module: Module) -> None:
    words = set(re.split(r"[._]", module.name))
    assert not words & {"utils", "util", "base", "common", "helper", "helpers", "manager", "misc"}


@each_module
def test_dataclasses_have_slots(module: Module) -> None:
    classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    decorators = [ast.unparse(decorator) for node in classes for decorator in node.decorator_list]
    assert [text for text in decorators if text.startswith("dataclass") and "slots=True" not in text] == []


@each_source
def test_no_handler_catches_everything(module: Module) -> None:
    handlers = [node for node in ast.walk(module.tree) if isinstance(node, ast.ExceptHandler)]
    caught = [ast.unparse(handler.type) if handler.type else "everything" for handler in handlers]
    assert not set(caught) & {"everything", "Exception", "BaseException"}


@each_source
def test_nothing_is_left_undone(module: Module) -> None:
    unfinished = "TO" + "DO|FIX" + "ME|XX" + "X|NotImplemented" + r"Error|pytest\.(mark\.)?(skip|xfail)\b"
    assert re.findall(rf"\b({unfinished})", module.source) == []


@each_module
def test_functions_do_not_read_the_environment(module: Module) -> None:
    reads = re.compile(r"\bgetenv\(|\benviron(\[|\.get\()")
    assert [function.name for function in module.functions if reads.search(ast.unparse(function))] == []


def test_no_file_names_a_folder_of_one_machine() -> None:
    texts = [path for suffix in ("py", "md", "toml", "txt", "yaml") for path in checkout_files(f"*.{suffix}")]
    folder = re.compile(r"(?<![\w.:/-])/(home|root|work|Users|opt)/\w")
    texts += [ROOT / "Makefile", ROOT / ".ci" / "run"]
    assert [path.name for path in texts if folder.search(path.read_text(encoding="utf-8"))] == []
