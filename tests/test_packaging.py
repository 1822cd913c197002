"""Set-up and packaging: the Python found, the environment made, the wheel built."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DIST_INFO = f"msa_icp_jax-{PROJECT['project']['version']}.dist-info"
SYSTEM_PATH = "/usr/bin:/bin"


def run(*command, cwd=None, env=None):
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- tools/find_python.sh ------------------------------------------------------------------------


def fake_python(path: Path, version: tuple[int, int], missing: str = "") -> Path:
    """An interpreter that runs the code it is given under a made-up version and path."""
    prelude = (
        "import sys, sysconfig; "
        f"sys.version_info = ({version[0]}, {version[1]}, 7, 'final', 0); "
        f"sys._base_executable = '{path}'; "
        # Whatever build runs the tests, the fake one is an ordinary build.
        "known = sysconfig.get_config_var; "
        "sysconfig.get_config_var = lambda name: 0 if 'GIL' in name else known(name); "
    )
    if missing:
        prelude += f"sys.modules['{missing}'] = None; "
    return write_script(path, f'exec "{sys.executable}" -c "{prelude} exec(sys.argv[1])" "$2"\n')


class Machine:
    """A scratch machine: its own home, its own root, and one folder of Pythons on PATH."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.root = folder / "root"
        self.bin = folder / "bin"
        # The shell's own tools, without the Pythons that lie beside them.
        tools = folder / "tools"
        tools.mkdir()
        for name in ("sh", "cat", "id", "sed", "tail", "tr"):
            (tools / name).symlink_to(shutil.which(name, path=SYSTEM_PATH))
        self.env = {
            "HOME": str(self.home),
            "FIND_PYTHON_ROOT": str(self.root),
            "PATH": f"{self.bin}:{tools}",
        }

    def find(self, **env: str | Path):
        extra = {name: str(value) for name, value in env.items()}
        return run("sh", ROOT / "tools/find_python.sh", env=self.env | extra)

    def found(self, **env: str | Path) -> Path:
        answer = self.find(**env)
        assert answer.returncode == 0, answer.stderr
        return Path(answer.stdout.removesuffix("\n"))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_new_enough_python3_is_taken(machine):
    python = fake_python(machine.bin / "python3", (3, 13))
    fake_python(machine.bin / "python3.12", (3, 12))
    assert machine.found() == python


@pytest.mark.parametrize("minor", [12, 13, 14, 15])
def test_a_newer_python_beside_an_older_python3_is_taken(machine, minor):
    fake_python(machine.bin / "python3", (3, 11))
    fake_python(machine.bin / "python", (2, 7))
    python = fake_python(machine.bin / f"python3.{minor}", (3, minor))
    assert machine.found() == python


@pytest.mark.parametrize(
    "place",
    [
        "home/.pyenv/versions/3.13.0/bin/python3.13",
        "home/.local/share/uv/python/cpython-3.13.1-linux-x86_64-gnu/bin/python3.13",
        "home/.asdf/installs/python/3.13.0/bin/python3.13",
        "home/.local/share/mise/installs/python/3.13.0/bin/python3.13",
        "home/miniconda3/bin/python3.13",
        "home/miniforge3/envs/science/bin/python3.13",
        "home/.local/bin/python3.13",
        "root/usr/local/bin/python3.13",
        "root/usr/bin/python3.13",
        "root/opt/homebrew/bin/python3.13",
        "root/opt/homebrew/opt/python@3.13/bin/python3.13",
        "root/home/linuxbrew/.linuxbrew/bin/python3.13",
        "root/opt/conda/bin/python3.13",
        "root/opt/python-3.13/bin/python3.13",
        "root/opt/python/cp313-cp313/bin/python3.13",
        "root/Library/Frameworks/Python.framework/Versions/3.13/bin/python3.13",
        "home/.pyenv/versions/with a space/bin/python3",
    ],
)
def test_a_python_off_path_is_found(machine, tmp_path, place):
    fake_python(machine.bin / "python3", (3, 11))
    python = fake_python(tmp_path / place, (3, 13))
    assert machine.found() == python


@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [
        ("PYENV_ROOT", "moved", "moved/versions/3.12.1/bin/python3.12"),
        ("UV_PYTHON_INSTALL_DIR", "moved", "moved/cpython-3.12/bin/python3.12"),
        ("ASDF_DATA_DIR", "moved", "moved/installs/python/3.12.1/bin/python3.12"),
        ("MISE_DATA_DIR", "moved", "moved/installs/python/3.12.1/bin/python3.12"),
        ("XDG_DATA_HOME", "moved", "moved/uv/python/cpython-3.12/bin/python3.12"),
        ("CONDA_PREFIX", "moved", "moved/bin/python3.12"),
        ("PATH", "moved/shims", "moved/versions/3.12.1/bin/python3.12"),
    ],
)
def test_a_manager_that_was_moved_is_found(machine, tmp_path, variable, value, place):
    python = fake_python(tmp_path / place, (3, 12))
    before = machine.env.get(variable, "")
    after = f"{tmp_path / value}:{before}" if before else tmp_path / value
    assert machine.found(**{variable: after}) == python


def test_candidates_that_fail_are_passed_over(machine):
    write_script(machine.bin / "python3.12", "echo 'python3.12: command not found' >&2; exit 127\n")
    write_script(machine.bin / "python3.13", "echo 'ok is not what this says'; exit 0\n")
    fake_python(machine.bin / "python3.14", (3, 14), missing="ensurepip")
    write_script(machine.bin / "python3.15", "cat; exit 1\n")
    (machine.bin / "python").mkdir()
    python = fake_python(machine.home / ".pyenv/versions/3.12.1/bin/python3.12", (3, 12))
    assert machine.found() == python


def test_a_shim_that_prints_a_notice_still_counts(machine):
    python = fake_python(machine.home / "real/python3.12", (3, 12))
    write_script(machine.bin / "python3.12", f'echo "a new release is out"; exec "{python}" "$@"\n')
    assert machine.found() == python


def test_no_usable_python_is_said_with_what_was_seen_and_what_to_install(machine):
    fake_python(machine.bin / "python3", (3, 11))
    fake_python(machine.bin / "python3.12", (3, 12), missing="ensurepip")
    write_script(machine.bin / "python3.13", "exit 127\n")
    answer = machine.find()
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert f"{machine.bin}/python3: Python 3.11.7, older than 3.12" in answer.stderr
    assert f"{machine.bin}/python3.12: Python 3.12.7 without the ensurepip module" in answer.stderr
    assert f"{machine.bin}/python3.13: does not run" in answer.stderr
    assert "apt-get install python3.12 python3.12-venv" in answer.stderr


def test_no_python_at_all_is_said(machine):
    answer = machine.find()
    assert answer.returncode == 1
    assert "no Python at all was found" in answer.stderr


def test_the_python_asked_for_is_used_or_refused_never_replaced(machine):
    fake_python(machine.bin / "python3", (3, 13))
    fake_python(machine.bin / "named", (3, 12))
    old = fake_python(machine.home / "old", (3, 11))
    assert machine.found(PYTHON="named") == machine.bin / "named"
    refused = machine.find(PYTHON=old)
    assert refused.returncode == 1
    assert f"PYTHON={old} cannot be used: Python 3.11.7, older than 3.12" in refused.stderr
    write_script(machine.bin / "shim", "echo 'no such version is installed' >&2; exit 127\n")
    broken = machine.find(PYTHON="shim")
    assert broken.returncode == 1
    assert "no such version is installed" in broken.stderr
    missing = machine.find(PYTHON="no-such-python")
    assert missing.returncode == 1
    assert "PYTHON=no-such-python cannot be used: it does not run" in missing.stderr


def test_the_interpreter_running_the_tests_is_usable():
    env = os.environ | {"PYTHON": sys.executable}
    answer = run("sh", ROOT / "tools/find_python.sh", env=env)
    assert answer.returncode == 0, answer.stderr
    # Never the environment's own python: the environment may be deleted and made anew.
    assert Path(answer.stdout.strip()) == Path(sys._base_executable)


# ---- tools/setup_env.sh --------------------------------------------------------------------------


class Checkout:
    """A scratch checkout whose interpreter records pip's calls in place of running pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        (self.folder / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "pyproject.toml", self.folder)
        for script in (ROOT / "tools").glob("*.sh"):
            shutil.copy(script, self.folder / "tools")
        self.log = folder / "pip.log"
        self.python = write_script(
            folder / "python3",
            f"""
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv $3" >>"{self.log}" ;;
"-m pip") shift 2; echo "pip $*" >>"{self.log}"; exit "${{PIP_FAILS:-0}}" ;;
*) exec "{sys._base_executable}" "$@" ;;
esac
""",
        )
        # Found by name, not named by PYTHON: its base interpreter is the one running these tests.
        self.finder = self.folder / "tools/find_python.sh"
        write_script(self.finder, f'echo "{self.python}"\n')

    def setup(self, extras="demo", *requirements, **env):
        """Run the script; returns its exit status and what was made and installed."""
        self.log.write_text("")
        variables = {"PATH": SYSTEM_PATH, "HOME": str(self.folder)} | env
        script = self.folder / "tools/setup_env.sh"
        answer = run("sh", script, ".venv", extras, *requirements, env=variables)
        steps = [line.split(" -e ")[-1] for line in self.log.read_text().splitlines()]
        return answer.returncode, steps


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_the_first_run_makes_the_environment_and_the_second_does_nothing(checkout):
    assert checkout.setup() == (0, ["venv .venv", ".[demo]"])
    assert checkout.setup() == (0, [])


def test_an_extra_that_is_missing_is_added_and_a_part_of_them_is_enough(checkout):
    checkout.setup("demo")
    assert checkout.setup("demo,test") == (0, [".[demo,test]"])
    assert checkout.setup("demo") == (0, [])
    assert checkout.setup("demo", "jax==0.11.2") == (0, [".[demo] jax==0.11.2"])


def test_a_changed_project_file_is_installed_again(checkout):
    checkout.setup()
    with (checkout.folder / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    assert checkout.setup() == (0, [".[demo]"])
    assert checkout.setup() == (0, [])


def test_an_install_that_failed_is_not_taken_for_whole(checkout):
    assert checkout.setup(PIP_FAILS="1") == (1, ["venv .venv", ".[demo]"])
    assert checkout.setup() == (0, ["venv .venv", ".[demo]"])


def test_an_update_that_failed_is_not_taken_for_whole(checkout):
    checkout.setup("demo")
    assert checkout.setup("demo,test", PIP_FAILS="1") == (1, [".[demo,test]"])
    assert checkout.setup("demo") == (0, ["venv .venv", ".[demo]"])


@pytest.mark.parametrize(
    "harm", ["interpreter gone", "interpreter broken", "pip gone", "emptied", "a file"]
)
def test_a_broken_environment_is_made_anew(checkout, harm):
    checkout.setup()
    environment = checkout.folder / ".venv"
    if harm == "interpreter gone":
        (environment / "bin/python").unlink()
    elif harm == "interpreter broken":
        write_script(environment / "bin/python", "exit 1\n")
    elif harm == "pip gone":
        no_pip = f'[ "$2" = "import pip" ] || exec "{sys._base_executable}" "$@"\nexit 1\n'
        write_script(environment / "bin/python", no_pip)
    else:
        shutil.rmtree(environment)
        environment.touch() if harm == "a file" else environment.mkdir()
    assert checkout.setup() == (0, ["venv .venv", ".[demo]"])


def test_a_moved_checkout_makes_its_environment_anew(checkout):
    checkout.setup()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    assert checkout.setup() == (0, ["venv .venv", ".[demo]"])


def test_another_python_asked_for_makes_the_environment_anew(checkout, tmp_path):
    checkout.setup()
    assert checkout.setup(PYTHON=str(checkout.python)) == (0, [])
    other = write_script(tmp_path / "other", checkout.python.read_text().split("\n", 1)[1])
    text = other.read_text().replace("*) exec", "-c*) echo 3.13 /elsewhere ;;\n*) exec")
    other.write_text(text)
    write_script(checkout.finder, f'echo "{other}"\n')
    assert checkout.setup(PYTHON=str(other)) == (0, ["venv .venv", ".[demo]"])
    assert checkout.setup(PYTHON=str(other)) == (0, [])


def test_no_python_means_no_environment(checkout):
    write_script(checkout.finder, "exit 1\n")
    status, steps = checkout.setup()
    assert (status, steps) == (1, [])
    assert not (checkout.folder / ".venv").exists()


# ---- metadata ------------------------------------------------------------------------------------


def test_the_metadata_states_what_is_supported():
    project = PROJECT["project"]
    assert project["name"] == "msa-icp-jax"
    assert project["requires-python"] == ">=3.12"
    assert "jax>=0.11.2,<0.13" in project["dependencies"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    extras = {"cuda12", "cuda13", "torch", "demo", "bench", "export", "docs", "test"}
    assert set(project["optional-dependencies"]) == extras


def test_both_packages_state_the_version():
    for package in ("msa_icp_jax", "interop/msa_icp_torch"):
        text = (ROOT / package / "__init__.py").read_text()
        assert f'__version__ = "{PROJECT["project"]["version"]}"\n' in text
        assert (ROOT / package / "py.typed").is_file()
    released = re.findall(
        r"^## (\d.*) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert released[0] == PROJECT["project"]["version"]


def test_the_workflow_runs_targets_on_the_pythons_that_are_claimed():
    text = (ROOT / ".github/workflows/test.yml").read_text()
    claimed = [c.split(" :: ")[-1] for c in PROJECT["project"]["classifiers"] if ":: 3." in c]
    assert f"python: {json.dumps(claimed)}\n" in text
    commands = re.findall(r"- run: (.*)", text)
    assert commands == ["make ${{ matrix.target }} PYTHON=python"]
    targets = ["test", "test-versions", "test-torch", "wheel"]
    assert all(re.search(rf"target: .*\b{target}\b", text) for target in targets)
    for target in targets:
        make_dry_run(target)


def make_dry_run(target):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    answer = run("make", "-n", target, cwd=ROOT, env=env)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_commands_set_up_before_they_run():
    demo = make_dry_run("demo")
    assert demo.index("setup_env.sh .venv demo") < demo.index("-m msa_icp_jax demo")
    test = make_dry_run("test")
    steps = ["setup_env.sh .venv demo,test", "-m ruff check", "-m mypy", "-m pytest"]
    places = [test.index(step) for step in steps]
    assert places == sorted(places)


def test_the_oldest_jax_that_is_run_is_the_oldest_that_is_allowed():
    (jax,) = [need for need in PROJECT["project"]["dependencies"] if need.startswith("jax>")]
    oldest = jax.removeprefix("jax>=").split(",")[0]
    assert f"demo,test jax=={oldest} jaxlib=={oldest}\n" in make_dry_run("test-versions")


def test_ci_runs_the_suite():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().endswith("make test\n")


# ---- wheel ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    built = run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the unpacked wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile"]
    done = run(sys.executable, "-m", "pip", "install", *options, "--target", folder, wheel)
    assert done.returncode == 0, done.stderr
    return folder


def run_installed(installed, code, cwd, **env):
    """Run code with the wheel, and not the checkout, on the path; in a folder of its own."""
    start = f"""
import sys
checkout = [{str(ROOT)!r}, {str(ROOT / "interop")!r}]
sys.path = [{str(installed)!r}] + [entry for entry in sys.path if entry not in checkout]
"""
    return run(
        sys.executable, "-I", "-W", "error", "-c", start + code, cwd=cwd, env=os.environ | env
    )


def packaged_files():
    """Every file of the checkout that the wheel has to hold, by its path in the wheel."""
    for package in (ROOT / "msa_icp_jax", ROOT / "interop/msa_icp_torch"):
        for path in package.rglob("*"):
            if path.suffix in {".py", ".npz", ".typed"}:
                yield path.relative_to(package.parent).as_posix()


def test_the_wheel_holds_every_module_and_the_data(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = set(packaged_files())
    assert "msa_icp_jax/__init__.py" in expected
    assert expected - held == set()
    packages = {name.split("/")[0] for name in held}
    tops = {name.split("/")[0] for name in expected} | {DIST_INFO}
    assert packages == tops
    assert f"{DIST_INFO}/licenses/LICENSE" in held


def test_the_wheel_works_away_from_the_checkout(installed, tmp_path):
    code = "import msa_icp_jax; print(msa_icp_jax.__file__); print(*msa_icp_jax.__all__)"
    answer = run_installed(installed, code, tmp_path)
    assert answer.returncode == 0, answer.stderr
    location, names = answer.stdout.splitlines()
    assert Path(location) == installed / "msa_icp_jax/__init__.py"
    assert "prepare_msa_icp_indexer" in names.split()


def test_every_module_of_the_wheel_imports(installed, tmp_path):
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in packaged_files()
        if name.startswith("msa_icp_jax/") and name.endswith(".py") and "__main__" not in name
    ]
    code = f"import importlib\nfor name in {sorted(modules)}: importlib.import_module(name)"
    answer = run_installed(installed, code, tmp_path)
    assert answer.returncode == 0, answer.stderr


def test_the_demonstration_starts_from_the_wheel(installed, tmp_path):
    code = """
import runpy
sys.argv = ["msa_icp_jax", "demo", "--help"]
runpy.run_module("msa_icp_jax", run_name="__main__", alter_sys=True)
"""
    answer = run_installed(installed, code, tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "usage" in answer.stdout.lower()


def test_importing_the_package_starts_no_backend(installed, tmp_path):
    """Starting a backend takes a GPU's memory and fixes the device count; importing must not."""
    # No backend has this name, so whatever starts one fails; the second run proves that it does.
    start_nothing = {"JAX_PLATFORMS": "no_such_platform"}
    answer = run_installed(installed, "import msa_icp_jax", tmp_path, **start_nothing)
    assert answer.returncode == 0, answer.stderr
    proof = run_installed(installed, "import jax; jax.devices()", tmp_path, **start_nothing)
    assert proof.returncode != 0
    assert "no_such_platform" in proof.stderr
