"""The Helm chart as rendered, and the pods that it makes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from trtmesh.chassis.settings import load_settings
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.tokenizer.settings import TokenizerSettings

from deploy import helm

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "trtmesh"
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    **{
        file.stem: yaml.safe_load(file.read_text("utf-8"))
        for file in sorted((CHART / "examples").glob("*.yaml"))
    },
}
RELEASE, NAMESPACE = "demo", "mesh"
SETTINGS: Mapping[str, type[SecuredSettings]] = {
    "router": RouterSettings,
    "tokenizer": TokenizerSettings,
    "engine": EngineSettings,
}

Object = dict[str, Any]


def render(values: Mapping[str, Any], release: str = RELEASE) -> Sequence[Object]:
    """The objects of a release; those of tests too, without the notes. Nobody changes them."""
    return _rendered(json.dumps(values), release)[0]


def notes(values: Mapping[str, Any]) -> str:
    return _rendered(json.dumps(values), RELEASE)[1]


@cache
def _rendered(values: str, release: str) -> tuple[Sequence[Object], str]:
    files = helm.render(CHART, json.loads(values), release, NAMESPACE)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    objects = [
        one
        for path, text in files.items()
        if path.endswith(".yaml")
        for one in yaml.load_all(text, loader)
        if one
    ]
    (said,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    return objects, said


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


@dataclass(frozen=True)
class Pod:
    """The template of the pods of an object."""

    owner: Object
    metadata: Object
    spec: Object

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(self.metadata["labels"])

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def ports(self) -> set[int]:
        return {each["containerPort"] for each in self.container.get("ports", ())}

    @property
    def flags(self) -> list[str]:
        """The words after `python -m trtmesh.SERVICE`."""
        args = list(self.container["args"])
        if self.container.get("command", [""])[0] != "bash":
            return args
        # A worker over several nodes, started by a script.
        words = shlex.split(args[0].partition("-m trtmesh.engine")[2])
        return [word for word in words if word != "\n"]


def pods(objects: Sequence[Object]) -> Iterator[Pod]:
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "Deployment":
            yield Pod(one, spec["template"]["metadata"], spec["template"]["spec"])
        elif one["kind"] == "Pod":
            yield Pod(one, one["metadata"], spec)
        elif one["kind"] == "LeaderWorkerSet":
            for role in ("leaderTemplate", "workerTemplate"):
                template = spec["leaderWorkerTemplate"][role]
                yield Pod(one, template["metadata"], template["spec"])


def services(objects: Sequence[Object]) -> list[Pod]:
    """The pods that run a service of the mesh."""
    return [pod for pod in pods(objects) if pod.component in SETTINGS]


def selects(selector: Mapping[str, Any], pod: Pod) -> bool:
    """Whether a selector by labels matches."""
    return selector.items() <= pod.labels.items()


def config_of(pod: Pod, objects: Sequence[Object]) -> str:
    """The configuration file that a pod mounts."""
    (name,) = [each["configMap"]["name"] for each in pod.spec["volumes"] if "configMap" in each]
    return str(named(objects, "ConfigMap", name)["data"]["mesh.yaml"])


def image_environment(component: str) -> dict[str, str]:
    """The variables that an image sets, which take precedence over a file."""
    text = (DEPLOY / f"{component}.Dockerfile").read_text("utf-8")
    return dict(re.findall(r"\b(TRTMESH_\w+)=(\S+)", text))


def settings_of(pod: Pod, objects: Sequence[Object], directory: Path) -> SecuredSettings:
    """What the service makes of a pod's arguments, file and variables. Raises SettingsError."""
    file = directory / "mesh.yaml"
    file.write_text(config_of(pod, objects), "utf-8")
    flags = [word.replace("/config/mesh.yaml", str(file)) for word in pod.flags]
    assert f"--config={file}" in flags
    given = {each["name"]: each.get("value", "") for each in pod.container.get("env", ())}
    return load_settings(
        SETTINGS[pod.component], flags, {**image_environment(pod.component), **given}
    )
