"""Forecasts for one model from its config alone, whatever the settings."""

from dataclasses import dataclass, field
from typing import Any

from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import can_recall, layer_policies, loses
from kvlite.model.calibration import Calibration
from kvlite.model.load import LoadedModel
from kvlite.model.shape import ModelShape
from kvlite.model.weights import Weights
from kvlite.offload import HostKVStore
from kvlite.planner.forecast import Task, forecast
from kvlite.planner.meta_cache import MetaOpCache
from kvlite.planner.meta_model import meta_model
from kvlite.planner.peaks import Forecast


@dataclass
class Forecaster:
    """Forecasts for one model; `config` is transformers'. Without a tokenizer, each word that a
    method adds counts as one token. Unless it is for a CPU, the device has Triton's kernels."""

    config: Any
    shape: ModelShape
    calibration: Calibration | None = None
    tokenizer: Any = None
    on_cpu: bool = False
    _models: dict[Any, LoadedModel] = field(default_factory=dict)
    _op_cache: MetaOpCache = field(default_factory=MetaOpCache)

    def model(self, weights: Weights, streamed: bool = False) -> LoadedModel:
        """The model on the meta device, for these weights or others that need as much working
        memory."""
        key = self.kind(weights, streamed)
        if key not in self._models:
            self._models[key] = meta_model(
                self.config,
                self.shape,
                weights,
                tokenizer=self.tokenizer,
                calibration=self.calibration,
                streamed=streamed,
                kernels=not self.on_cpu,
            )
        return self._models[key]

    def kind(self, weights: Weights, streamed: bool) -> Any:
        """A key, the same for weights that need as much working memory."""
        packed = weights.packs or weights.keeps_experts_packed(self.shape.model_type)
        one_by_one = streamed and self.shape.chosen_experts > 0
        return weights.dtype, weights.name if packed else "", one_by_one

    def first_turn(
        self,
        config: EngineConfig,
        weights: Weights,
        *,
        chunk: int,
        tokens: int,
        longest: int,
        batch: int = 1,
        streamed: bool = False,
    ) -> Forecast:
        """What a conversation's first turn will take.

        Args:
            chunk: tokens that go through a layer together.
            tokens: how many to read, at least one.
            longest: tokens of the answer that memory is planned for.
            streamed: whether layers are streamed.

        Raises:
            SettingError: the settings do not fit the model, or each other.
        """
        shape, dtype, bits = self.shape, weights.dtype, config.kv_bits
        method = config.method.fitted(shape, self.calibration)
        limit = self._limit(config, tokens, longest)
        budget = self.budget(config, weights, tokens=tokens, longest=longest)
        store, recalls = None, config.settings.recall != "off" and can_recall(method)
        if recalls and loses(method, budget, tokens, limit, bits):
            store = HostKVStore.empty(shape, dtype, config.recall_bits)
        model = self.model(weights, streamed)
        cache = model.empty_cache(batch)
        policies = layer_policies(method, shape, budget, tokens, None, tokens, bits)
        recalled = 0 if store is None else config.settings.recall_entries
        task = Task(tokens, longest, 0, chunk, recalled)
        return forecast(model, cache, policies, task, store, self._op_cache)

    def budget(self, config: EngineConfig, weights: Weights, *, tokens: int, longest: int) -> int:
        """The mean entries of a KV head in a conversation's first turn; args and errors are those
        of `first_turn`."""
        return config.budget.resolve(
            self.shape,
            config.method.fitted(self.shape, self.calibration),
            tokens,
            longest,
            weights.dtype.itemsize,
            config.kv_bits,
            self._limit(config, tokens, longest),
        )

    def _limit(self, config: EngineConfig, tokens: int, longest: int) -> int:
        return config.settings.longest_within(max(longest, self.shape.max_context - tokens))
