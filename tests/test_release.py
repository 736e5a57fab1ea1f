"""What a release is made of: PyPI's page, the changelog, the citation, the pins."""

import re
import tomllib

import pytest
import yaml

import fewkeys
from test_project import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_pictures_and_links_of_pypis_page_are_whole_addresses_of_what_is_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"].replace("$HFPR_VERSION", "1.2.3"), shown)
    before, after = (re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", page) for page in (text, shown))
    source = PROJECT["project"]["urls"]["Source"]
    for (picture, target), (_, address) in zip(before, after, strict=True):
        if not target.startswith("http"):
            raw = source.replace("github.com", "raw.githubusercontent.com")
            assert address == (f"{raw}/v1.2.3/{target}" if picture else f"{source}/blob/v1.2.3/{target}") or (
                not picture and target.endswith(".png") and address == f"{raw}/v1.2.3/{target}"
            )
            assert (ROOT / target.partition("#")[0]).exists()


def test_citation_and_changelog_know_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == fewkeys.__version__
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Source"]
    assert fewkeys.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_workflows_and_templates_are_yaml_that_says_what_it_runs():
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    assert ".ci/run" in [step.get("run") for step in tests["jobs"]["all"]["steps"]]
    oldest = tests["jobs"]["versions"]["strategy"]["matrix"]["include"][0]["packages"]
    needs = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["hf"]]
    least = dict(re.match(r"(\w+)>=([\d.]+)", need).groups() for need in needs)
    for package in oldest.split():
        name, _, version = package.partition("==")
        assert version == f"{least[name]}.*", f"the oldest {name} that is tried is not the oldest that is allowed"


def test_every_pin_is_one_version():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9._-]+==[0-9][\w.]*", pin) for pin in pins)
    assert len({pin.partition("==")[0] for pin in pins}) == len(pins)
