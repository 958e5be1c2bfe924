"""The namespace as a whole: every name, signature, field and base class that stock's modules define is here too.

Stock is asked by introspection, so that nothing depends on a hand-written list but the exceptions.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint.metadata as stock_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # stock says so on every call

IS_OLD = torch.__version__ < (2, 13)
"""Whether stock has grown since. Ours has what later versions added, which does programs for this one no harm."""

PACKAGE = ""
MODULES = [
    PACKAGE,
    "api",
    "metadata",
    "planner",
    "planner_helpers",
    "default_planner",
    "storage",
    "filesystem",
    "stateful",
    "state_dict_saver",
    "state_dict_loader",
    "utils",
    "_nested_dict",
    "_traverse",
    "_storage_utils",
    "_dedup_save_plans",
    "_dedup_tensors",
    "resharding",
    "_sharded_tensor_utils",
    "staging",
    "_state_dict_stager",
    "format_utils",
    "optimizer",
    "_checkpointer",
    "hf_storage",
    "quantized_hf_storage",
    "_consolidate_hf_safetensors",
    "_hf_utils",
    "_fsspec_filesystem",
    "fsspec_filesystem",
    "_extension",
    "logger",
    "logging_handlers",
    "state_dict",
    "protocol",
    "_version",
    "_async_executor",
    "_async_thread_executor",
    "_async_process_executor",
]

# Every module of stock that is not here, and why.
_DROPPED = "stock dropped it again before 2.13"
LEFT_OUT_MODULES = {
    "_hf_storage": _DROPPED,
    "_experimental": "prototypes, whose own documentation asks not to use them",
    "_pg_transport": "how stock sends states between ranks; programs use it through _ReplicationStager",
}

_INSIDE = "an internal step of stock's implementation, which is divided differently here"
_MESSAGES = "part of how stock talks to its one writer process; here any number of them are kept by `background`"

# Every name of stock that is not here, and why. "Class.method" for members of classes.
LEFT_OUT = {
    "init_logger": "a library must not install handlers on loggers, and importing stock's module does",
    "_iterate_state_dict": "its contract is to replace what it does not know by None",
    "_print_nested": _INSIDE,
    "_OverlappingCpuLoader._done": _INSIDE,
    "_OverlappingCpuLoader._drain": _INSIDE,
    "_OverlappingCpuLoader._finish": _INSIDE,
    "_FileSystemWriter._metadata_exists": _INSIDE,
    "_FileSystemWriter._get_metadata_path": _INSIDE,
    "_FileSystemWriter._write_data": _INSIDE,
    "DefaultSavePlanner._create_global_plan_with_caching": _INSIDE,
    "DefaultSavePlanner._finish_plan_with_caching": _INSIDE,
    "_AsyncCheckpointProcess": _MESSAGES,
    "_AsyncCheckpointRequest": _MESSAGES,
    "_CheckpointRequestIdentifier": _MESSAGES,
    "_CheckpointSaveProcessControlOpts": _MESSAGES,
    "_ProcessGroupInitInfo": _MESSAGES,
    "_ProcessBasedAsyncCheckpointExecutor._execute_save_impl": _MESSAGES,
    "_CHECKPOINT_PROCESS": _MESSAGES,
    "_ReplicationStager._persist_state_dict": _INSIDE,
    "DefaultStager._stage": _INSIDE,
    "StateDictStager._stage_untyped_storage": _INSIDE,
    "StateDictStager._offload_tensor": _INSIDE,
    "StateDictStager._keep_alive": _INSIDE,
    "StateDictStager._reconstruct": _INSIDE,
    "StateDictStager.deepcopy_with_tensor_offload": _INSIDE,
    "HuggingFaceStorageReader._process_read_request": _INSIDE,
    "HuggingFaceStorageReader._read_files_from_queue": _INSIDE,
    "HuggingFaceStorageWriter._split_by_storage_plan": _INSIDE,
    "QuantizedHuggingFaceStorageReader._load_quantization_metadata": _INSIDE,
    "QuantizedHuggingFaceStorageReader._build_weight_scale_mapping": _INSIDE,
    "QuantizedHuggingFaceStorageReader._process_read_request": _INSIDE,
    "QuantizedHuggingFaceStorageReader._get_slice_to_block_mapping": _INSIDE,
    "QuantizedHuggingFaceStorageReader._dequantize_tensor_mxfp4": _INSIDE,
    "QuantizedHuggingFaceStorageReader._dequantize_tensor": _INSIDE,
    "QuantizedHuggingFaceStorageReader._is_tensor_quantized": _INSIDE,
    "QuantizedHuggingFaceStorageReader._read_quantized_tensor_with_block_alignment": _INSIDE,
    "_FqnData": _INSIDE,
    "_InputFileData": _INSIDE,
    "_OutputFileData": _INSIDE,
    "_calculate_max_contiguous_elements": _INSIDE,
    "_consolidate_safetensors_files": _INSIDE,
    "_parse_input_metadata": _INSIDE,
    "_process_output_file": _INSIDE,
    "_read_tensor_data": _INSIDE,
    "_write_data": _INSIDE,
    "_write_metadata": _INSIDE,
    "_write_overall_metadata_file": _INSIDE,
    "_write_sub_tensor_to_file_optimized": _INSIDE,
    "pyzstd_module_name": _INSIDE,
    "zstandard_module_name": _INSIDE,
    "FSDP_WRAPPED_MODULE": "a constant of torch's modules for FSDP, which `state_dict` happens to import",
    "HYBRID_SHARDING_STRATEGIES": "the same",
    "_CHECKPOINT_PREFIX": "the same, for activation checkpointing",
    "_HuggingFaceStorageReader": "2.7 had it under this name; it is HuggingFaceStorageReader since",
    "_HuggingFaceStorageWriter": "2.7 had it under this name; it is HuggingFaceStorageWriter since",
    "_read_tensor_data_mmap": _DROPPED,
    "QuantizedHuggingFaceStorageReader._calculate_scale_shape": _DROPPED,
}
CHANGED_SINCE = {
    **dict.fromkeys(("HuggingFaceStorageReader", "HuggingFaceStorageWriter"), "2.8: token and save_sharded, by fsspec"),
    "_HFStorageInfo": "fields of 2.8",
    **dict.fromkeys(("_write_item", "_write_files_from_queue"), "2.7: without a format"),
    "_AsyncCheckpointExecutor": "2.7 and 2.8: other arguments",
    "_ThreadBasedAsyncCheckpointExecutor": "2.7 and 2.8: other arguments",
    "_ProcessBasedAsyncCheckpointExecutor": "2.7 and 2.8: other arguments",
}
"""What stock itself changed. With an old torch ours are those of the newer ones, and are not compared."""

# Fields that our data classes have in addition. They come last, have defaults, and are ignored by code for stock.
ADDED_FIELDS = {
    "SavePlan": {"replica_digests"},
    "_StorageInfo": {"seal"},
    "_HFStorageInfo": {"position", "header_digest"},
}
# Those of them that can be given by position. Only readers and writers of the format make these.
ADDED_POSITIONS = {"_StorageInfo": {"seal"}, "_HFStorageInfo": {"position", "header_digest"}}
if not hasattr(stock_metadata.TensorProperties, "strides"):  # since 2.15
    ADDED_FIELDS["TensorProperties"] = ADDED_POSITIONS["TensorProperties"] = {"strides"}

# Type aliases belong to one module; other modules of stock have them because they import them.
HOMES = {
    "STATE_DICT_TYPE": "metadata",
    "STORAGE_TYPES": "metadata",
    "WRAPPED_EXCEPTION": "api",
    "OBJ_PATH": "_traverse",
    "FLATTEN_MAPPING": "_nested_dict",
}


class Pair(NamedTuple):
    """One thing in stock's module, and what our module has under its name."""

    name: str
    stock: Any
    ours: Any

    def __repr__(self) -> str:
        return self.name


def stock_module(name: str) -> ModuleType:
    """A module of stock; an empty one in its place if the installed torch is too old to have it."""
    full = f"torch.distributed.checkpoint.{name}".rstrip(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # which new versions give for old modules
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise
            return ModuleType(full)


def our_module(name: str) -> ModuleType:
    return importlib.import_module(f"holdfast.dcp.{name}".rstrip("."))


def names_of(module: ModuleType) -> Iterator[str]:
    """What a module of stock offers: the names that it defines and its constants, not what it happens to import."""
    for name, value in vars(module).items():
        if name.startswith("__") or inspect.ismodule(value):
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            is_offered = value.__module__ == module.__name__ or module.__name__.endswith(".checkpoint")
        else:
            is_at_home = HOMES.get(name) in (None, module.__name__.rpartition(".")[2])
            is_offered = is_at_home and (name.isupper() or isinstance(value, (str, int, float)))
        if is_offered and name not in ("TYPE_CHECKING", "T", "R"):
            yield name


def pairs(*, classes: bool) -> list[Any]:
    """All classes, or everything else, that stock's modules define and ours have too."""
    found = {}
    for module in MODULES:
        for name in names_of(stock_module(module)):
            value = getattr(stock_module(module), name)
            if IS_OLD and name in CHANGED_SINCE:
                continue
            if inspect.isclass(value) == classes and hasattr(our_module(module), name):
                found[f"{module}.{name}".lstrip(".")] = Pair(name, value, getattr(our_module(module), name))
    return [pytest.param(pair, id=key) for key, pair in found.items()]


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_a_stock_module_is_in_ours(module: str) -> None:
    expected = set(names_of(stock_module(module))) | set(getattr(stock_module(module), "__all__", []))

    absent = sorted(name for name in expected - LEFT_OUT.keys() if not hasattr(our_module(module), name))

    assert absent == []


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_declares_public_exists_and_includes_what_stock_declares(module: str) -> None:
    ours = our_module(module)
    declared = set(getattr(ours, "__all__", []))

    assert [name for name in declared if not hasattr(ours, name)] == []
    assert set(getattr(stock_module(module), "__all__", [])) - LEFT_OUT.keys() <= declared | vars(ours).keys()


def test_every_module_of_stock_is_in_ours() -> None:
    package = stock_module(PACKAGE)
    theirs = {found.name for found in pkgutil.iter_modules(package.__path__)}
    ours = {found.name for found in pkgutil.iter_modules(our_module(PACKAGE).__path__)}

    assert sorted(theirs - ours) == sorted(theirs & LEFT_OUT_MODULES.keys())
    assert sorted(theirs & ours) == sorted(theirs & set(MODULES))


def test_the_exceptions_are_really_missing() -> None:
    """An exception that was filled in must leave the list."""
    present = {name for module in MODULES for name in names_of(our_module(module))}
    members = {
        f"{name}.{member}"
        for module in MODULES
        for name, value in vars(our_module(module)).items()
        if inspect.isclass(value)
        for member in dir(value)
    }

    assert sorted(LEFT_OUT.keys() & (present | members)) == []


def normal(value: Any) -> Any:
    """A default value in a form that can be compared between the namespaces."""
    if isinstance(value, enum.Enum):
        return type(value).__name__, value.name
    if inspect.isfunction(value):
        return "a function"
    if value is dataclasses.MISSING or type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "a factory"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, dataclasses.asdict(value)
    return value


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (parameter.name, parameter.kind, normal(parameter.default))
        for parameter in inspect.signature(function).parameters.values()
    ]


def assert_callable_alike(stock: Any, ours: Any, added: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """The same parameters in the same order; ours may have further ones, if they are keyword-only or known to us.

    Ours may also have a default where stock has none, and take any arguments beyond those of stock.
    """
    expected, found = parameters(stock), parameters(ours)
    if IS_OLD:
        names = [name for name, _, _ in expected if "__" not in name]  # which cannot be given by name
        assert [name for name, _, _ in found if name in names] == names
        return
    required = {name for name, _, default in expected if default is inspect.Parameter.empty}
    found = [(name, kind, inspect.Parameter.empty if name in required else default) for name, kind, default in found]
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    for name, kind, default in (parameter for parameter in found if parameter not in expected):
        if kind not in variadic:
            assert kind is inspect.Parameter.KEYWORD_ONLY or name in added, f"{name} is not a parameter of stock"
            assert default is not inspect.Parameter.empty, f"{name} has no default"
    assert [p for p in found if p in expected] == expected


@pytest.mark.parametrize("pair", pairs(classes=False))
def test_functions_take_the_arguments_of_stock_and_constants_have_its_values(pair: Pair) -> None:
    if inspect.isfunction(pair.stock):
        assert_callable_alike(pair.stock, pair.ours)
    elif isinstance(pair.stock, (str, int, float)):
        assert pair.ours == pair.stock


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """What a class of stock itself defines, without what Python adds to every class, enum or protocol."""
    for name, value in vars(cls).items():
        if not name.startswith(("__", "_abc")) and "protocol" not in name:
            yield name, value


@pytest.mark.parametrize("pair", pairs(classes=True))
def test_classes_have_the_constructor_methods_and_properties_of_stock(pair: Pair) -> None:
    if issubclass(pair.stock, enum.Enum):
        return
    assert_callable_alike(pair.stock, pair.ours, ADDED_POSITIONS.get(pair.name, set()))
    for name, member in members_of(pair.stock):
        if f"{pair.name}.{name}" in LEFT_OUT:
            continue
        assert hasattr(pair.ours, name), f"{pair.name}.{name} is missing"
        if inspect.isroutine(member):
            assert type(inspect.getattr_static(pair.ours, name)) is type(member), name
            assert_callable_alike(getattr(pair.stock, name), getattr(pair.ours, name))


@pytest.mark.parametrize("pair", pairs(classes=True))
def test_enums_have_the_members_and_values_of_stock(pair: Pair) -> None:
    if issubclass(pair.stock, enum.Enum):
        assert {m.name: m.value for m in pair.ours} == {m.name: m.value for m in pair.stock}


@pytest.mark.parametrize("pair", pairs(classes=True))
def test_data_classes_have_the_fields_of_stock_in_its_order(pair: Pair) -> None:
    assert dataclasses.is_dataclass(pair.ours) == dataclasses.is_dataclass(pair.stock)
    if not dataclasses.is_dataclass(pair.stock):
        return
    expected = [(f.name, normal(f.default), f.compare, f.hash) for f in dataclasses.fields(pair.stock)]
    found = [(f.name, normal(f.default), f.compare, f.hash) for f in dataclasses.fields(pair.ours)]

    if IS_OLD:
        assert [field for field in found if field in expected] == expected
        return
    assert found[: len(expected)] == expected
    assert {field[0] for field in found[len(expected) :]} == ADDED_FIELDS.get(pair.name, set())
    assert pair.ours.__dataclass_params__.frozen == pair.stock.__dataclass_params__.frozen


@pytest.mark.parametrize("pair", pairs(classes=True))
def test_a_subclass_must_implement_the_methods_that_it_must_implement_with_stock(pair: Pair) -> None:
    assert getattr(pair.ours, "__abstractmethods__", set()) == getattr(pair.stock, "__abstractmethods__", set())


def test_our_classes_derive_from_each_other_as_those_of_stock_do() -> None:
    classes = [param.values[0] for param in pairs(classes=True)]

    broken = [
        f"{child.name} is no {parent.name}"
        for child in classes
        for parent in classes
        if parent.stock in child.stock.__mro__ and parent.ours not in child.ours.__mro__
    ]

    assert broken == []


def test_checkpoint_exception_is_seen_by_except_exception_unlike_in_stock() -> None:
    import holdfast.dcp as dcp
    from holdfast.errors import HoldfastError

    assert issubclass(dcp.CheckpointException, Exception)
    assert issubclass(dcp.CheckpointException, HoldfastError)


def test_objects_of_a_save_and_a_load_have_the_attributes_that_they_have_in_stock(tmp_path) -> None:
    def used(namespace: str) -> dict[str, set[str]]:
        dcp = importlib.import_module(namespace)
        folder = tmp_path / namespace
        writer, reader = dcp.FileSystemWriter(folder), dcp.FileSystemReader(folder)
        savers, loader = dcp.DefaultSavePlanner(), dcp.DefaultLoadPlanner()
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, planner=savers)
        dcp.load({"a": torch.ones(2)}, storage_reader=reader, planner=loader)
        ranks = importlib.import_module(f"{namespace}.utils")._DistWrapper(None, False, 0)
        return {
            kind: {name for name in vars(thing) if not name.startswith("_")}
            for kind, thing in {
                "writer": writer,
                "reader": reader,
                "save planner": savers,
                "load planner": loader,
                "ranks": ranks,
                "write transforms": getattr(writer, "transforms", dcp),  # which old versions do not have
                "read transforms": getattr(reader, "transforms", dcp),
            }.items()
            if thing is not dcp
        }

    stock, ours = used("torch.distributed.checkpoint"), used("holdfast.dcp")
    cache = {"state_dict_cache"}  # of FileSystemWriter as a stager, which keeps memory instead

    assert {kind: absent for kind, names in stock.items() if (absent := names - ours[kind] - cache)} == {}
