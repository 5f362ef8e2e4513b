"""Adapters kept by a router for workers that lack them."""

from __future__ import annotations

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.parsing import parse_config
from trtmesh.chassis.vocabulary import Adapter, Lora
from trtmesh.router.fleet.adapters import AdapterSettings, KeptAdapter, KeptAdapters
from trtmesh.router.placement import Residency, WorkerAdapters
from trtmesh.router.placement.residency import NO_ADAPTERS
from trtmesh.v1 import generation_pb2 as pb


def message(number: int, content: bytes = b"") -> pb.LoraConfig:
    """An adapter by number, with weights where `content` has any."""
    lora = pb.LoraConfig(id=number)
    if content:
        lora.weights.CopyFrom(
            pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=[1, len(content) // 2], data=content)
        )
        lora.config.CopyFrom(pb.Tensor(data_type=pb.DATA_TYPE_INT32, shape=[1, 3], data=bytes(12)))
    return lora


def holding(adapter: Adapter) -> WorkerAdapters:
    return WorkerAdapters({(adapter.id, adapter.version): Residency(adapter)})


def find(kept: KeptAdapters, lora: pb.LoraConfig, model: str = "m") -> KeptAdapter | None:
    asked = parse_config(pb.GenerationConfig(lora=lora)).lora
    assert asked is not None
    return kept.find(model, asked, lora)


def test_adapter_is_found_by_model_and_number() -> None:
    kept = KeptAdapters(AdapterSettings())
    brought = find(kept, message(7, b"ab"))
    assert brought is not None
    assert find(kept, message(7)) is brought
    assert find(kept, message(8)) is None
    assert find(kept, message(7), "another") is None
    assert kept.find("m", Lora(name="unnumbered"), pb.LoraConfig(name="unnumbered")) is None


def test_version_is_that_of_workers() -> None:
    brought = find(KeptAdapters(AdapterSettings()), message(7, b"ab"))
    asked = parse_config(pb.GenerationConfig(lora=message(7, b"ab"))).lora
    assert brought is not None
    assert asked is not None
    assert asked.weights is not None
    assert asked.config is not None
    version = AdapterContent.of_arrays(asked.weights, asked.config).version
    assert brought.identity == Adapter(7, "", version)


def test_new_weights_are_a_new_version_and_items_keep_theirs() -> None:
    kept = KeptAdapters(AdapterSettings())
    old, new = find(kept, message(7, b"ab")), find(kept, message(7, b"cd"))
    assert old is not None
    assert new is not None
    assert old.identity != new.identity
    assert find(kept, message(7)) is new
    config = pb.GenerationConfig(lora=message(7))
    old.put(config, holding(new.identity))
    assert config.lora.weights.data == b"ab"
    assert config.lora.version == old.identity.version


def test_weights_go_only_to_workers_without_the_version() -> None:
    brought = find(KeptAdapters(AdapterSettings()), message(7, b"ab"))
    assert brought is not None
    config = pb.GenerationConfig(lora=message(7))
    brought.put(config, holding(brought.identity))
    assert not config.lora.HasField("weights")
    assert not config.lora.HasField("config")
    assert (config.lora.id, config.lora.version) == (7, brought.identity.version)
    brought.put(config, NO_ADAPTERS)
    assert config.lora.weights.data == b"ab"


def test_longest_unused_are_forgotten() -> None:
    first = find(KeptAdapters(AdapterSettings()), message(1, b"ab"))
    assert first is not None
    size = first.message.ByteSize()
    kept = KeptAdapters(AdapterSettings(bytes=2 * size))
    for number in (1, 2):
        find(kept, message(number, b"ab"))
    find(kept, message(1))
    find(kept, message(3, b"ab"))
    assert [find(kept, message(number)) is not None for number in (1, 2, 3)] == [True, False, True]
    assert kept.size_bytes == 2 * size


def test_without_memory_an_item_still_gets_its_own_adapter() -> None:
    kept = KeptAdapters(AdapterSettings(bytes=0))
    assert find(kept, message(1, b"ab")) is not None
    assert find(kept, message(1)) is None
    assert kept.size_bytes == 0
