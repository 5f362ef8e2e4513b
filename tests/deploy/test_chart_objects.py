"""Examples of the chart render to objects that Kubernetes and its operators know, and typing errors are refused."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import kubernetes_validate.utils
import pytest
import yaml
from deploy.chart import CHART, EXAMPLES, NAMESPACE, Object, named, of_kind, render
from public_data import public_file

from deploy import helm

OLDEST, NEWEST = "1.27", "1.37"
FROM = {"gpu": "1.33"}
"""Where not the oldest: an image volume."""

CRDS = Path(__file__).with_name("crds")
PUBLIC = {
    "LeaderWorkerSet": "leaderworkersets.crd.yaml",
    "InferencePool": "inferencepools.crd.yaml",
}

# Else it reads megabytes of schemas for every object.
for read in ("all_versions", "schema_contents"):
    setattr(kubernetes_validate.utils, read, cache(getattr(kubernetes_validate.utils, read)))


def closed(schema: Any) -> Any:
    """The schema without room for unknown keys."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    # Kubernetes' formats of numbers are none of JSON schema, and its object metadata has no schema here.
    found.pop("format", None)
    if "metadata" in found.get("properties", {}) and "spec" in found["properties"]:
        found["properties"]["metadata"] = {"type": "object"}
    return found


@cache
def custom(kind: str) -> tuple[str, Any]:
    """The apiVersion and the schema of a custom resource."""
    if kind in PUBLIC:
        crd = yaml.safe_load(public_file(PUBLIC[kind]).read_text("utf-8"))
        (version,) = crd["spec"]["versions"]
        group = f"{crd['spec']['group']}/{version['name']}"
        return group, closed(version["schema"]["openAPIV3Schema"])
    known = json.loads((CRDS / f"{kind}.json").read_text("utf-8"))
    return known["apiVersion"], closed(known["schema"])


@cache
def check_as(version: str, text: str) -> None:
    kubernetes_validate.validate(json.loads(text), version, strict=True)


def check(one: Object, *versions: str) -> None:
    """Raises ValidationError unless Kubernetes, or the operator of a custom resource, takes the object as it is."""
    if (CRDS / f"{one['kind']}.json").exists() or one["kind"] in PUBLIC:
        group, schema = custom(one["kind"])
        assert one["apiVersion"] == group
        jsonschema.Draft202012Validator(schema).validate(one)
        return
    for version in versions:
        check_as(version, json.dumps(one, sort_keys=True))


@pytest.mark.parametrize(
    ("example", "version"), [("defaults", OLDEST), *((example, NEWEST) for example in EXAMPLES)]
)
def test_an_example_is_clean(example: str, version: str) -> None:
    report = helm.lint(CHART, EXAMPLES[example], f"v{version}.0")
    assert report["errors"] == []
    # An icon is for catalogues.
    told = [each for each in report["messages"] if "icon is recommended" not in each["error"]]
    assert told == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_takes_every_object(example: str) -> None:
    objects = [one for one in render(EXAMPLES[example]) if one["kind"] not in PUBLIC]
    assert len(objects) > 10
    for one in objects:
        check(one, FROM.get(example, OLDEST), NEWEST)


@pytest.mark.parametrize(
    ("kind", "example"), [("LeaderWorkerSet", "nodes"), ("InferencePool", "inference-gateway")]
)
def test_an_operator_takes_the_object(kind: str, example: str) -> None:
    (one,) = of_kind(render(EXAMPLES[example]), kind)
    check(one)


@pytest.mark.parametrize("example", EXAMPLES)
def test_names_are_unique_and_short(example: str) -> None:
    objects = render(
        EXAMPLES[example], release="a-release-with-a-name-of-fifty-three-characters-long"
    )
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    assert [name for _, name in names if len(name) > 63] == []


def planted(path: str) -> tuple[str, str, str]:
    kind, _, rest = path.partition(" ")
    where, _, key = rest.rpartition(".")
    return kind, where, key


@pytest.mark.parametrize(
    ("example", "typo"),
    [
        ("defaults", "Deployment spec.template.spec.contaners"),
        ("defaults", "Deployment spec.template.spec.containers.0.readinessProbe.grpc.prot"),
        ("defaults", "Service spec.publishNotReadyAdresses"),
        ("defaults", "NetworkPolicy spec.policyType"),
        ("defaults", "PodDisruptionBudget spec.maxUnavailble"),
        ("gpu", "HorizontalPodAutoscaler spec.behavior.scaleDown.stabilizationSeconds"),
        ("autoscaling", "ScaledObject spec.triggers.0.metric"),
        ("autoscaling", "ScaledObject spec.minReplicas"),
        ("monitoring", "ServiceMonitor spec.endpoints.0.tls"),
        ("secure", "Certificate spec.dnsName"),
        ("nodes", "LeaderWorkerSet spec.leaderWorkerTemplate.sice"),
        ("nodes", "LeaderWorkerSet spec.leaderWorkerTemplate.leaderTemplate.spec.tolerance"),
        ("inference-gateway", "InferencePool spec.endpointPickerRef.failMode"),
    ],
)
def test_a_typo_in_an_object_would_be_found(example: str, typo: str) -> None:
    """The objects as they are pass; with one unknown key they do not."""
    kind, where, key = planted(typo)
    one = json.loads(json.dumps(of_kind(render(EXAMPLES[example]), kind)[-1]))
    check(one, NEWEST)
    at = one
    for step in where.split("."):
        at = at[int(step)] if step.isdigit() else at[step]
    at[key] = "planted"
    with pytest.raises(jsonschema.ValidationError, match=key):
        check(one, NEWEST)


def mappings(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for key, value in values.items():
        if isinstance(value, dict):
            yield from mappings(value, (*path, key))


FREE = {
    *(("router", "service", "annotations"), ("networkPolicy", "monitoring")),
    *(("monitoring", part, "labels") for part in ("serviceMonitor", "dashboards", "rules")),
    *((part, "podAnnotations") for part in ("router", "tokenizer")),
    *((part, "nodeSelector") for part in ("router", "tokenizer")),
    *(
        (part, "resources", each)
        for part in ("router", "tokenizer")
        for each in ("requests", "limits")
    ),
}
"""Values whose keys are names of the operator's."""


def test_a_typo_in_any_value_is_refused_by_name() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    paths = [path for path in mappings(values) if path not in FREE]
    assert len(paths) > 20
    for path in paths:
        typo: dict[str, Any] = {"typpo": 1}
        for key in reversed(path):
            typo = {key: typo}
        with pytest.raises(helm.HelmValuesError, match="typpo"):
            render(typo)


POOL = {"name": "cpu"}


@pytest.mark.parametrize(
    ("values", "named_in_message"),
    [
        ({"pools": [{**POOL, "replica": 2}]}, "replica"),
        ({"pools": [{**POOL, "role": "prefil"}]}, "role"),
        ({"pools": [{**POOL, "settings": {"torch": {"kv_cache": {"byte": 1}}}}]}, "byte"),
        ({"pools": [{**POOL, "settings": {"torch": {"dtype": "float12"}}}]}, "dtype"),
        ({"pools": [{**POOL, "settings": {"role": "prefill"}}]}, "role"),
        ({"pools": [{**POOL, "env": [{"name": "TRTMESH_ENGINE_ROLE", "value": "x"}]}]}, "env"),
        ({"pools": [{**POOL, "gpus": 1, "backend": "simulated"}]}, "needs no gpus"),
        ({"pools": [POOL, POOL]}, "two of the name cpu"),
        ({"pools": [{**POOL, "autoscaling": {"minReplicas": 3, "maxReplicas": 2}}]}, "at least"),
        ({"pools": [{**POOL, "gpus": 8, "nodes": {"size": 2, "sshSecret": "s"}}]}, "tensorrt_llm"),
        (
            {
                "pools": [
                    {
                        **POOL,
                        "backend": "tensorrt_llm",
                        "gpus": 8,
                        "nodes": {"size": 2, "sshSecret": "s"},
                        "settings": {"tensorrt_llm": {"parallel": {"tensor": 8}}},
                    }
                ]
            },
            "is 8",
        ),
        ({"router": {"settings": {"port": 9}}}, "port"),
        ({"router": {"settings": {"tls": {"certificate": "/x"}}}}, "tls"),
        ({"router": {"settings": {"http": {"port": 1}}}}, "port"),
        ({"router": {"settings": {"deadlines": {"queue_second": 1}}}}, "queue_second"),
        ({"router": {"engines": ["engine"]}}, "engines"),
        ({"router": {"graceSeconds": 5}}, "minDrainSeconds"),
        ({"router": {"engines": ["vllm://gpu-1:50051"]}}, "networkPolicy.egress"),
        ({"router": {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}}, "at least"),
        ({"tokenizer": {"settings": {"tool_forma": "json"}}}, "tool_forma"),
        ({"model": {"volume": {"existingClaim": "a", "copy": {"reference": "b"}}}}, "volume"),
        ({"tls": {"certManager": {"enabled": True}}}, "issuer.name is empty"),
        ({"inferencePool": {"enabled": True}}, "endpointPicker.name"),
    ],
)
def test_a_wrong_value_is_refused_with_a_reason(
    values: dict[str, Any], named_in_message: str
) -> None:
    with pytest.raises(helm.HelmError, match=named_in_message):
        render(values)


TEXT = "a-text"
HOSTILE = ("a\" b: {c}, d]} # 'e\n- f: &g", "true")
"""Texts that YAML reads as something else unless they are quoted."""


Places = Sequence[tuple[str | int, ...]]
"""Of texts within values."""


def texts(values: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of texts."""
    pairs = enumerate(values) if isinstance(values, list) else values.items()
    for key, value in pairs:
        # Templates of the operator's; texts within a text.
        if key in ("extraObjects", "settings"):
            continue
        if isinstance(value, dict | list):
            yield from texts(value, (*path, key))
        elif isinstance(value, str):
            yield (*path, key)


def places() -> Mapping[str, Places]:
    """The places of texts by the first example that has them."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    first: dict[tuple[str, ...], tuple[str, tuple[str | int, ...]]] = {}
    for example, values in {**EXAMPLES, "defaults": defaults}.items():
        for path in texts(values):
            first.setdefault(tuple(key for key in path if isinstance(key, str)), (example, path))
    found: dict[str, list[tuple[str | int, ...]]] = {}
    for example, path in first.values():
        found.setdefault(example, []).append(path)
    return found


def with_text(values: Any, paths: Places, text: str) -> Any:
    changed = json.loads(json.dumps(values))
    for *path, key in paths:
        at = changed
        for each in path:
            at = at[each]
        at[key] = text
    return changed


def taken(values: Any, paths: Places, text: str) -> Iterator[tuple[Places, Sequence[Object]]]:
    """The places that take a text, as many at once as the chart takes together, and the objects."""
    # A place that the schema refuses would spoil the others.
    paths = [each for each in paths if allowed().is_valid(with_text(values, [each], text))]
    try:
        if paths:
            yield paths, render(with_text(values, paths, text))
    except helm.HelmError:
        if len(paths) > 1:
            half = len(paths) // 2
            yield from taken(values, paths[:half], text)
            yield from taken(values, paths[half:], text)


@cache
def allowed() -> jsonschema_rs.Validator:
    """The schema of values."""
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    return jsonschema_rs.validator_for(schema)


def without_sums(objects: Sequence[Object]) -> str:
    """The objects without what depends on the contents of others."""
    return re.sub(r'"checksum/config": "[0-9a-f]{64}"', "", json.dumps(objects))


@pytest.mark.slow
@pytest.mark.parametrize("example", places())
def test_texts_stay_texts_or_are_refused(example: str) -> None:
    """Whatever they hold: nothing else of any object differs."""
    values = EXAMPLES[example] or yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    found = [*taken(values, places()[example], TEXT)]
    assert found
    for paths, plain in found:
        for text in HOSTILE:
            inner = json.dumps(text)[1:-1]
            for those, objects in taken(values, paths, text):
                same = plain if those == paths else render(with_text(values, those, TEXT))
                assert without_sums(objects) == without_sums(same).replace(TEXT, inner), those


def test_no_object_of_the_schema_is_open() -> None:
    """But those whose keys are names, and Kubernetes' own that stand in a template as given."""
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    assert [path for path in open_objects(schema) if not path.startswith(GIVEN)] == []


GIVEN = (
    ".properties.global",
    ".properties.extraObjects",
    ".$defs.env.items.properties.valueFrom",
    ".$defs.affinity.properties.",
    ".$defs.labelSelector.properties.matchExpressions",
    # TensorRT-LLM's own arguments, and models in Triton's words, which the router checks at its start.
    ".$defs.settings.TensorRtLlmSettings.properties.options",
    ".$defs.settings.TritonSettings.properties.models",
)


def open_objects(schema: Any, path: str = "") -> Iterator[str]:
    if isinstance(schema, list):
        for number, each in enumerate(schema):
            yield from open_objects(each, f"{path}.{number}")
    elif isinstance(schema, dict):
        types = schema.get("type", ())
        is_object = "object" in (types if isinstance(types, list) else [types])
        if is_object and schema.get("additionalProperties", True) is True:
            yield path
        for key, value in schema.items():
            yield from open_objects(value, f"{path}.{key}")


def test_the_schema_is_current() -> None:
    script = runpy.run_path(str(CHART.parent / "values_schema.py"))
    assert script["PAGE"].read_text("utf-8") == script["page"](), (
        "run `python deploy/helm/values_schema.py`"
    )


def test_the_version_is_that_of_the_project() -> None:
    pyproject = (CHART.parents[2] / "pyproject.toml").read_text("utf-8")
    about = helm.metadata(CHART)
    assert f'\nversion = "{about["appVersion"]}"\n' in pyproject


def test_objects_of_ones_own_are_templates() -> None:
    runbook = named(render(EXAMPLES["monitoring"]), "ConfigMap", "demo-runbook")
    assert runbook["data"]["first"] == f"kubectl -n {NAMESPACE} get pods"
