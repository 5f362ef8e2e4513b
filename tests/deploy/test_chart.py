"""What the chart's objects mean: to the services that read them, and to each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.chart import (
    CHART,
    DEPLOY,
    EXAMPLES,
    RELEASE,
    Object,
    Pod,
    config_of,
    image_environment,
    named,
    notes,
    of_kind,
    pods,
    render,
    selects,
    services,
    settings_of,
)
from trtmesh.chassis.health import LIVE
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.app import COMMANDS
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings

every_example = pytest.mark.parametrize("example", EXAMPLES)


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in values:
        for key, value in each.items():
            old = found.get(key)
            if isinstance(old, dict) and isinstance(value, dict):
                found[key] = merged(old, value)
            else:
                found[key] = value
    return found


@every_example
def test_services_take_their_arguments_and_listen_where_the_pod_says(
    example: str, tmp_path: Path
) -> None:
    objects = render(EXAMPLES[example])
    running = services(objects)
    assert {pod.component for pod in running} == {"router", "tokenizer", "engine"}
    for pod in running:
        settings = settings_of(pod, objects, tmp_path)
        assert settings.host == "0.0.0.0"
        ports = {settings.port, settings.metrics_port}
        if isinstance(settings, RouterSettings):
            ports.add(settings.http.port)
            # Reached by port-forward and from within the pod.
            assert settings.admin.host == "127.0.0.1"
        assert pod.ports == ports


@every_example
def test_a_pod_lives_longer_than_it_drains(example: str, tmp_path: Path) -> None:
    objects = render(EXAMPLES[example])
    for pod in services(objects):
        grace = settings_of(pod, objects, tmp_path).grace_seconds
        assert pod.spec["terminationGracePeriodSeconds"] > grace + 10


@every_example
def test_routers_look_for_all_engines_and_tokenizers(example: str, tmp_path: Path) -> None:
    objects = render(EXAMPLES[example])
    (router,) = [pod for pod in services(objects) if pod.component == "router"]
    settings = settings_of(router, objects, tmp_path)
    assert isinstance(settings, RouterSettings)
    for component, entries in (("engine", settings.engines), ("tokenizer", settings.tokenizers)):
        meant = [pod for pod in services(objects) if pod.component == component]
        found = []
        for entry in entries:
            host, _, port = entry.partition(":")
            service = named(objects, "Service", host)
            # One address for each pod that serves.
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["publishNotReadyAddresses"] is False
            (pod,) = [pod for pod in pods(objects) if selects(service["spec"]["selector"], pod)]
            assert int(port) in pod.ports
            found.append(pod)
        assert found == meant


@every_example
def test_engines_serve_the_model_in_their_role_on_their_devices(
    example: str, tmp_path: Path
) -> None:
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), EXAMPLES[example])
    objects = render(values)
    for pool in values["pools"]:
        name = f"{RELEASE}-trtmesh-engine-{pool['name']}"
        (pod,) = [pod for pod in services(objects) if pod.name == name]
        settings = settings_of(pod, objects, tmp_path)
        assert isinstance(settings, EngineSettings)
        assert settings.model == values["model"]["name"]
        assert (settings.role, settings.backend) == (
            pool.get("role", "mixed"),
            pool.get("backend", "torch"),
        )
        gpus = pool.get("gpus", 0)
        limits = pod.container.get("resources", {}).get("limits", {})
        assert int(limits.get("nvidia.com/gpu", 0)) == gpus
        tolerated = [each["key"] for each in pod.spec.get("tolerations", ())]
        assert ("nvidia.com/gpu" in tolerated) == bool(gpus)
        if settings.backend == "torch":
            assert str(settings.torch.device).startswith("cuda:0" if gpus else "cpu")
            assert len(str(settings.torch.device).split(",")) == max(gpus, 1)
        # The simulated one needs no model.
        mounts = {each["mountPath"] for each in pod.container["volumeMounts"]}
        assert ("/model" in mounts) == (settings.backend != "simulated")
        assert settings.model_dir == (Path("/model") if "/model" in mounts else None)


@every_example
def test_images_agree_with_the_arguments(example: str, tmp_path: Path) -> None:
    """An image's variables say nothing else, and its Dockerfile exists."""
    objects = render(EXAMPLES[example])
    for pod in services(objects):
        image = pod.container["image"].rpartition("/")[2].partition(":")[0]
        file = image.removeprefix("engine-") if "tensorrt" in image else image.partition("-")[0]
        assert (DEPLOY / f"{file}.Dockerfile").is_file()
        assert image_environment(pod.component)
        flags = {word.partition("=")[0] for word in pod.flags}
        for variable in image_environment(pod.component):
            name = variable.removeprefix(f"TRTMESH_{pod.component.upper()}_")
            assert "--" + name.lower().replace("_", "-") in flags


def test_a_volume_of_the_model_is_one_of_four() -> None:
    def source(volume: Mapping[str, Any]) -> Any:
        objects = render({"model": {"volume": dict(volume)}})
        found = []
        for pod in services(objects):
            found += [each for each in pod.spec["volumes"] if each["name"] == "model"]
        assert found[0] == found[1]
        return {key: value for key, value in found[0].items() if key != "name"}

    claimed = {"claimName": "models", "readOnly": True}
    assert source({"existingClaim": "models"}) == {"persistentVolumeClaim": claimed}
    made = source({"claim": {"size": "1Gi"}})["persistentVolumeClaim"]["claimName"]
    objects = render({"model": {"volume": {"claim": {"size": "1Gi"}}}})
    assert named(objects, "PersistentVolumeClaim", made)["metadata"]["annotations"] == {
        "helm.sh/resource-policy": "keep"
    }
    assert source({"image": {"reference": "m:1"}}) == {
        "image": {"reference": "m:1", "pullPolicy": "IfNotPresent"}
    }
    assert source({"copy": {"reference": "m:1"}}) == {"emptyDir": {}}


def test_a_pool_may_have_another_volume() -> None:
    pool = {"name": "built", "modelVolume": {"copy": {"reference": "built:2", "path": "/engine"}}}
    objects = render({"model": {"volume": {"existingClaim": "models"}}, "pools": [pool]})
    by_component = {pod.component: pod for pod in services(objects)}
    (copies,) = by_component["engine"].spec["initContainers"]
    assert (copies["image"], copies["command"]) == (
        "built:2",
        ["cp", "-R", "/engine/.", "/target"],
    )
    assert "initContainers" not in by_component["tokenizer"].spec


@every_example
def test_no_probe_kills_a_busy_process(example: str) -> None:
    """Liveness asks whether the event loop answers, and a start has as long as a model takes."""
    objects = render(EXAMPLES[example])
    secure = "tls" in EXAMPLES[example]
    for pod in services(objects):
        probes = {
            when: pod.container[f"{when}Probe"] for when in ("startup", "readiness", "liveness")
        }
        assert asked(probes["liveness"], pod, secure=secure) == LIVE
        assert probes["liveness"]["failureThreshold"] * probes["liveness"]["periodSeconds"] >= 120
        from_zero = example == "from-zero" and pod.component == "router"
        ready = LIVE if from_zero else ""
        assert asked(probes["readiness"], pod, secure=secure) == ready
        # A router waits for engines, and must not be killed for their loads.
        starts = LIVE if pod.component == "router" else ""
        assert asked(probes["startup"], pod, secure=secure) == starts
        seconds = probes["startup"]["failureThreshold"] * probes["startup"]["periodSeconds"]
        assert seconds >= (1800 if pod.component == "engine" else 60)


def asked(probe: Mapping[str, Any], pod: Pod, *, secure: bool) -> str:
    """The service of the process's health that a probe asks for."""
    if not secure:
        assert probe["grpc"]["port"] in pod.ports
        return str(probe["grpc"].get("service", ""))
    # The kubelet has no certificate.
    python, _, module, address, *service = probe["exec"]["command"]
    assert (python, module) == ("python", "trtmesh.chassis.probe")
    assert int(address.removeprefix("127.0.0.1:")) in pod.ports
    variables = {each["name"]: each.get("value", "") for each in pod.container["env"]}
    tls = ClientTls.of_environment(variables)
    assert tls is not None
    mounts = {each["mountPath"] for each in pod.container["volumeMounts"]}
    assert {str(each.parent) for each in (tls.ca, tls.certificate, tls.key) if each} <= mounts
    return "".join(service)


def workload(objects: Sequence[Object], name: str) -> list[Pod]:
    """The pods that the workload of a name serves with: of a group over nodes, the leader alone."""
    return [pod for pod in services(objects) if pod.name == name]


@every_example
def test_selectors_match_the_pods_meant_and_no_others(example: str) -> None:
    objects = render(EXAMPLES[example])
    # Another release, in the same namespace.
    strangers = list(pods(render(EXAMPLES[example], release="other")))
    everyone = [*pods(objects), *strangers]
    selectors = []
    for one in objects:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "Deployment":
            selectors.append((spec["selector"]["matchLabels"], name))
            spreads = spec["template"]["spec"].get("topologySpreadConstraints", ())
            selectors += [(spread["labelSelector"]["matchLabels"], name) for spread in spreads]
        elif one["kind"] == "PodDisruptionBudget":
            selectors.append((spec["selector"]["matchLabels"], name))
        elif one["kind"] == "Service":
            # That of clients has the short name.
            meant = f"{name}-router" if name == f"{RELEASE}-trtmesh" else name
            selectors.append((spec["selector"], meant))
        elif one["kind"] == "InferencePool":
            selectors.append((spec["selector"]["matchLabels"], f"{name}-router"))
    assert len(selectors) > 6
    for selector, name in selectors:
        (meant,) = workload(objects, name)
        assert [pod for pod in everyone if selects(selector, pod)] == [meant]
        assert not {"app.kubernetes.io/version", "helm.sh/chart"} & selector.keys()


@every_example
def test_each_workload_has_a_disruption_budget(example: str) -> None:
    values, objects = EXAMPLES[example], render(EXAMPLES[example])
    budgets = {one["metadata"]["name"]: one for one in of_kind(objects, "PodDisruptionBudget")}
    if "podDisruptionBudget" in values:
        assert not budgets
        return
    assert budgets.keys() == {pod.name for pod in services(objects)}
    assert {one["spec"]["maxUnavailable"] for one in budgets.values()} == {1}


@every_example
def test_what_scales_exists_and_has_no_fixed_number(example: str) -> None:
    objects = render(EXAMPLES[example])
    scaled = set()
    for one in of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler"):
        spec = one["spec"]
        target = spec["scaleTargetRef"]
        found = named(objects, target["kind"], target["name"])
        assert found["apiVersion"] == target["apiVersion"]
        assert "replicas" not in found["spec"]
        scaled.add(target["name"])
        horizontal = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", spec)
        down = horizontal["behavior"]["scaleDown"]
        assert down["stabilizationWindowSeconds"] == 300
        assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    for pod in services(objects):
        assert ("replicas" in pod.owner["spec"]) == (pod.name not in scaled)
    assert bool(scaled) == (example in {"autoscaling", "from-zero", "gpu"})


def test_zero_replicas_are_none() -> None:
    objects = render({"pools": [{"name": "off", "replicas": 0}]})
    assert named(objects, "Deployment", f"{RELEASE}-trtmesh-engine-off")["spec"]["replicas"] == 0


def test_a_pool_beside_others_wakes_by_the_queue_and_an_empty_mesh_by_any_request() -> None:
    def waking(values: Mapping[str, Any], pool: str) -> dict[str, str]:
        scaled = named(render(values), "ScaledObject", f"{RELEASE}-trtmesh-engine-{pool}")
        return {
            each["metadata"]["query"]: each["metadata"]["activationThreshold"]
            for each in scaled["spec"]["triggers"]
        }

    burst = waking(EXAMPLES["autoscaling"], "burst")
    assert not any("trtmesh_router_waiting" in query for query in burst)
    assert [most for query, most in burst.items() if "router_queue_seconds" in query] == ["2"]
    rare = waking(EXAMPLES["from-zero"], "rare")
    assert [most for query, most in rare.items() if "trtmesh_router_waiting" in query] == ["0"]


# A small model of NetworkPolicies, enough for those of the chart.


def peers_match(peers: Sequence[Mapping[str, Any]] | None, pod: Pod | None) -> bool:
    """Whether a pod of the namespace, or None for anyone else, is among the peers."""
    if not peers:
        return True
    return pod is not None and any(
        "namespaceSelector" not in peer
        and selects(peer.get("podSelector", {}).get("matchLabels", {}), pod)
        for peer in peers
    )


def allowed(
    policies: Sequence[Object], direction: str, pod: Pod, other: Pod | None, port: int
) -> bool:
    peers, kind = ("to", "Egress") if direction == "egress" else ("from", "Ingress")
    isolated = False
    for policy in policies:
        spec = policy["spec"]
        if kind in spec["policyTypes"] and selects(spec["podSelector"]["matchLabels"], pod):
            isolated = True
            for rule in spec.get(direction, ()):
                ports = {each["port"] for each in rule.get("ports", ())}
                if peers_match(rule.get(peers), other) and (not ports or port in ports):
                    return True
    return not isolated


def connects(policies: Sequence[Object], source: Pod, target: Pod, port: int) -> bool:
    return allowed(policies, "egress", source, target, port) and allowed(
        policies, "ingress", target, source, port
    )


FLOWS = {
    ("router", "tokenizer"): {9001},
    ("router", "engine"): {9101},
    # KV.
    ("engine", "engine"): {9101},
    ("test", "router"): {8001},
}
"""Everything that connects within a release."""


@every_example
def test_policies_allow_the_flows_of_the_mesh_and_nothing_else(example: str) -> None:
    objects = render(EXAMPLES[example])
    policies = of_kind(objects, "NetworkPolicy")
    if not policies:
        assert not EXAMPLES[example]["networkPolicy"]["enabled"]
        return
    inside = [*pods(objects)]
    closed = {pod.component for pod in inside}
    for source in inside:
        for target in inside:
            flow = FLOWS.get((source.component, target.component), set())
            # Clients may come from anywhere, the pods of the mesh, which may not leave, excepted.
            if "ranks" in source.component + target.component or source.labels == target.labels:
                continue
            reached = {
                port
                for port in (22, 8000, 8001, 8002, 8003, 9001, 9101)
                if connects(policies, source, target, port)
            }
            assert reached == flow, (source.component, target.component)
    for pod in inside:
        # Names are looked up by those who have names to look up.
        asks = pod.component in ("router", "test") or "nodes" in pod.name
        assert allowed(policies, "egress", pod, None, 53) == asks
        assert not allowed(policies, "egress", pod, None, 443)
        open_to_all = {
            p for p in (8000, 8001, 8002, 9001, 9101) if allowed(policies, "ingress", pod, None, p)
        }
        door = pod.component == "router" and "clients" not in EXAMPLES[example].get(
            "networkPolicy", {}
        )
        assert open_to_all == ({8000, 8001} if door else set())
    assert {"router", "tokenizer", "engine"} <= closed


@every_example
def test_policies_name_ports_that_are_listened_on(example: str) -> None:
    objects = render(EXAMPLES[example])
    everyone = [*pods(objects)]
    for policy in of_kind(objects, "NetworkPolicy"):
        own = [p for p in everyone if selects(policy["spec"]["podSelector"]["matchLabels"], p)]
        assert own or policy["metadata"]["name"].endswith("-test")
        for rule in policy["spec"].get("ingress", ()):
            for port in rule.get("ports", ()):
                assert all(port["port"] in pod.ports for pod in own)
        for rule in policy["spec"].get("egress", ()):
            for peer in rule.get("to", ()):
                at = [p for p in everyone if selects(peer["podSelector"]["matchLabels"], p)]
                assert at
                for port in rule.get("ports", ()):
                    assert all(port["port"] in pod.ports for pod in at)


def test_a_group_over_nodes_talks_at_any_port_within_its_pool() -> None:
    objects = render(EXAMPLES["nodes"])
    policies = of_kind(objects, "NetworkPolicy")
    leader, ranks = [pod for pod in pods(objects) if pod.owner["kind"] == "LeaderWorkerSet"]
    assert leader.component == "engine"
    assert ranks.component == "engine-ranks"
    assert connects(policies, leader, ranks, 2222)
    assert connects(policies, ranks, leader, 49152)
    (router,) = [pod for pod in pods(objects) if pod.component == "router"]
    assert not connects(policies, router, ranks, 9101)


def referenced(pod: Pod) -> Iterator[tuple[str, str, str]]:
    """What a pod needs to start, as kind, name and key."""
    for volume in pod.spec["volumes"]:
        if "secret" in volume:
            for item in volume["secret"].get("items", [{"key": ""}]):
                yield "Secret", volume["secret"]["secretName"], item["key"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"], "mesh.yaml"
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], ""
    for variable in pod.container.get("env", ()):
        for source in variable.get("valueFrom", {}).values():
            yield "Secret", source["name"], source["key"]


GIVEN = {
    "cpu": {("PersistentVolumeClaim", "models", "")},
    "adapters": {
        ("PersistentVolumeClaim", "adapters", ""),
        ("PersistentVolumeClaim", "adapter-registry", ""),
    },
    "secure": {
        ("Secret", "trtmesh-keys", "api.keys"),
        ("Secret", "trtmesh-test-key", "api.key"),
        ("Secret", "trtmesh-admin", "token"),
        # Made by cert-manager.
        ("Secret", "demo-trtmesh-tls", ""),
    },
    "mutual-tls": {("Secret", "mesh-tls", "")},
    "nodes": {("PersistentVolumeClaim", "models", ""), ("Secret", "trtmesh-ssh", "")},
}
"""What an example's comments ask the operator for."""


@every_example
def test_what_a_pod_refers_to_exists_or_is_asked_for(example: str) -> None:
    objects = render(EXAMPLES[example])
    made = {
        (one["kind"], one["metadata"]["name"], key)
        for one in of_kind(objects, "ConfigMap", "PersistentVolumeClaim")
        for key in one.get("data", {"": ""})
    }
    needed = {each for pod in pods(objects) for each in referenced(pod)}
    assert needed - made == GIVEN.get(example, set())
    for certificate in of_kind(objects, "Certificate"):
        assert ("Secret", certificate["spec"]["secretName"], "") in needed


@every_example
def test_volumes_and_mounts_agree(example: str) -> None:
    for pod in pods(render(EXAMPLES[example])):
        volumes = [each["name"] for each in pod.spec["volumes"]]
        containers = [pod.container, *pod.spec.get("initContainers", ())]
        mounted = {each["name"] for one in containers for each in one["volumeMounts"]}
        assert sorted(volumes) == sorted(mounted)


@every_example
def test_arguments_name_files_that_are_mounted(example: str) -> None:
    for pod in services(render(EXAMPLES[example])):
        mounts = {each["mountPath"] for each in pod.container["volumeMounts"]}
        for word in pod.flags:
            _, _, value = word.partition("=/")
            if value:
                assert f"/{value.partition('/')[0]}" in mounts


@every_example
def test_nothing_secret_is_in_an_object(example: str) -> None:
    """Settings alone are in ConfigMaps, and those with a secret's value are none of them: they name files."""
    values, objects = EXAMPLES[example], render(EXAMPLES[example])
    assert of_kind(objects, "Secret") == []
    pools = {pool["name"]: pool for pool in values.get("pools", [{"name": "cpu"}])}
    for pod in services(objects):
        section = pod.component
        given = (
            pools[pod.labels["trtmesh/pool"]] if section == "engine" else values.get(section, {})
        )
        assert yaml.safe_load(config_of(pod, objects)) == {section: given.get("settings", {})}


@every_example
def test_pods_run_without_privileges(example: str) -> None:
    for pod in pods(render(EXAMPLES[example])):
        assert pod.spec["automountServiceAccountToken"] is False
        # A Service x-router would set X_ROUTER_PORT, a setting.
        assert pod.spec["enableServiceLinks"] is False
        if pod.owner["kind"] == "LeaderWorkerSet":
            # Ranks start over SSH, as root.
            continue
        whole = pod.spec["securityContext"]
        assert (whole["runAsNonRoot"], whole["runAsUser"]) == (True, 10001)
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (pod.container, *pod.spec.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert "/tmp" in {each["mountPath"] for each in pod.container["volumeMounts"]}


def templates(values: Mapping[str, Any]) -> dict[str, Any]:
    return {pod.name: (pod.metadata, pod.spec) for pod in services(render(values))}


@pytest.mark.parametrize(
    ("change", "component"),
    [
        ({"router": {"settings": {"defragment": True}}}, "router"),
        ({"tokenizer": {"settings": {"tool_format": "none"}}}, "tokenizer"),
        ({"pools": [{"name": "cpu", "settings": {"load_interval_seconds": 2}}]}, "engine-cpu"),
    ],
)
def test_a_changed_setting_starts_the_pods_that_have_it_anew(
    change: dict[str, Any], component: str
) -> None:
    one = {"pools": [{"name": "cpu"}]}
    if component == "tokenizer":
        change = {"tokenizer": {"settings": {"allow_request_templates": True}}}
    before, after = templates(one), templates(merged(one, change))
    assert {name for name in before if before[name] != after[name]} == {
        f"{RELEASE}-trtmesh-{component}"
    }


def test_keys_reach_routers_by_files() -> None:
    objects = render(EXAMPLES["secure"])
    (router,) = [pod for pod in services(objects) if pod.component == "router"]
    assert {"--api-keys-file=/api-keys/api.keys", "--admin-token-file=/admin/token"} <= {
        *router.flags
    }


def test_a_request_tests_the_release_as_a_client_would() -> None:
    objects = render(EXAMPLES["secure"])
    (test,) = [pod for pod in pods(objects) if pod.component == "test"]
    python, _, module, command = test.container["command"]
    assert (python, module) == ("python", "trtmesh.cli")
    assert command in {each.name for each in COMMANDS}
    assert "TRTMESH_API_KEY" in {each["name"] for each in test.container["env"]}
    assert f"--router={RELEASE}-trtmesh:8001" in test.container["args"]
    # Without a key of its own it would be refused.
    keyless = merged(EXAMPLES["secure"], {"apiKeys": {"test": {"existingSecret": ""}}})
    assert [pod for pod in pods(render(keyless)) if pod.component == "test"] == []


def test_certificates_have_the_names_by_which_routers_are_called() -> None:
    objects = render(EXAMPLES["secure"])
    (certificate,) = of_kind(objects, "Certificate")
    names = certificate["spec"]["dnsNames"]
    assert {"trtmesh.internal", f"{RELEASE}-trtmesh", "llm.example.org"} <= {*names}
    assert {"server auth", "client auth"} <= {*certificate["spec"]["usages"]}


def test_metrics_are_scraped_of_every_service_over_tls_too() -> None:
    for example in ("monitoring", "secure"):
        objects = render(EXAMPLES[example])
        (monitor,) = of_kind(objects, "ServiceMonitor")
        (endpoint,) = monitor["spec"]["endpoints"]
        selector = monitor["spec"]["selector"]
        (components,) = selector["matchExpressions"]
        scraped = [
            service
            for service in of_kind(objects, "Service")
            if selector["matchLabels"].items() <= service["metadata"]["labels"].items()
            and service["metadata"]["labels"][components["key"]] in components["values"]
        ]
        named_ports = [{p["name"] for p in service["spec"]["ports"]} for service in scraped]
        assert all(endpoint["port"] in names for names in named_ports)
        found = {
            pod.name
            for s in scraped
            for pod in pods(objects)
            if selects(s["spec"]["selector"], pod)
        }
        assert found == {pod.name for pod in services(objects)}
        assert (endpoint.get("scheme") == "https") == (example == "secure")


@every_example
def test_notes_begin_with_commands_for_this_release(example: str) -> None:
    text = notes(EXAMPLES[example])
    objects = render(EXAMPLES[example])
    for kind, prefix in (("Deployment", "deployment/"), ("Service", "service/")):
        for word in text.split():
            if word.startswith(prefix):
                assert named(objects, kind, word.removeprefix(prefix))
    body = text.partition("-d '")[2].partition("'")[0]
    assert json.loads(body)["max_tokens"] == 51
    assert ("https://" in text) == ("tls" in EXAMPLES[example])
