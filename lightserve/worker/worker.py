"""One rank of a model: loads it and runs the steps that the router plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from mmap import mmap

import torch
from msgspec.structs import replace
from torch import Tensor

from lightserve.common.basemodel import ModelArgs, TpPartBaseModel
from lightserve.common.device import check_head_dim, explain_out_of_memory, pick_device, shown_name
from lightserve.common.device.profile import ModelTraits, for_model
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.errors import InvalidRequestError
from lightserve.ipc.arena import ArenaReader
from lightserve.messages.control import (
    CpuKvSize,
    KvGroupSize,
    PoolingLimits,
    SlidingWindowKv,
    StateKv,
    StepLimits,
)
from lightserve.messages.int_arrays import int64s
from lightserve.messages.media import Sight
from lightserve.messages.step import NewReq, Step, StepResult
from lightserve.messages.worker_calls import CompileGrammar
from lightserve.model_files.config.kv_dtype import resolve_kv_dtype
from lightserve.model_files.source import ModelSource, pooling_of, stored_as
from lightserve.models.registry import get_model_class
from lightserve.models.served_config import read_served_config
from lightserve.worker.batch.arena import arena_of
from lightserve.worker.batch.images import BatchImages
from lightserve.worker.batch.infer_batch import InferBatch, PackedStep
from lightserve.worker.collector import PendingStep, StepCollector
from lightserve.worker.kv.identity import exchanged_identity, make_kv_identity, rank_of
from lightserve.worker.kv.offload.cpu_offload import CpuOffload, make_cpu_offload
from lightserve.worker.kv.offload.storage_backend import StorageBackend, make_storage_backend
from lightserve.worker.kv.pools import kept_tokens
from lightserve.worker.kv.size import kv_size
from lightserve.worker.kv.state_size import DETERMINISTIC_BLOCK
from lightserve.worker.kv.transfer.transfer import KvTransfer, KvTransferArgs, make_kv_transfer
from lightserve.worker.lora import LoraCache, lora_args, merged_adapter
from lightserve.worker.memory import WorkerMemory, memory_to_release, weight_pool, weights_in
from lightserve.worker.precision import activation_dtype, dtype_of, precision_summary, ranks_summary
from lightserve.worker.request_limits import max_running, wanted_len
from lightserve.worker.rpc import GetResult
from lightserve.worker.sampling.grammar import GrammarManager
from lightserve.worker.sampling.logprobs import SampledLogprobs
from lightserve.worker.sampling.sampler import Sampler, SamplingPlan
from lightserve.worker.sampling.step_masks import GrammarMaskBuilder, StepMasks
from lightserve.worker.sampling.thinking import ThinkingBudget
from lightserve.worker.speculation.draft_runner import DraftRunner
from lightserve.worker.speculation.heads.load import load_draft_head, without_head
from lightserve.worker.step_runner import StepOut, StepRunner
from lightserve.worker.warm_up import (
    FIRST_POOL_TOKENS,
    FIRST_STATE_ROWS,
    draft_steps,
    in_all_pools,
    warm_up_steps,
    with_adapter,
    with_image,
)
from lightserve.worker.weights.files import all_metadata, with_progress
from lightserve.worker.weights.updater import WeightUpdater


class ModelWorker:
    """The model of one rank, and the requests that it runs.

    A step passes the parts in this order: batch, sampler (its plan), masks, runner, sampler, collector.
    """

    cpu_offload: CpuOffload | None = None
    storage_tiers: StorageBackend | None = None
    weights: WeightUpdater | None = None
    memory: WorkerMemory | None = None

    def __init__(
        self,
        config: WorkerConfig,
        source: ModelSource,
        parallel: Parallel,
        device_index: int | None = None,
        has_trainer: bool = False,
    ) -> None:
        """``device_index`` among the machine's devices; None: the rank. ``has_trainer``: it may sleep."""
        self._platform = pick_device(config.device)
        self._device = self._platform.torch_device(parallel.rank if device_index is None else device_index)
        self._platform.bind(self._device, config.deterministic, config.ops_backend)
        is_packed = self._platform.keeps_gguf_packed(parallel.num_ranks) and config.quantization_config is None
        source = stored_as(source, config.quantization, packed_by_default=is_packed)
        self.model_config = read_served_config(source, config)
        check_head_dim(self._platform, max(self.model_config.head_dims))
        self.pooling = pooling_of(source, config.model_type, config.task, config.pooling, config.score_template)
        self.max_req_total_len = self.model_config.request_len(wanted_len(config, self.pooling))
        dtype = dtype_of(config, self.model_config, self._platform)
        self._kv_dtype = resolve_kv_dtype(config.kv_dtype, self.model_config)
        self._platform.check_kv_dtype(self._kv_dtype, self._device)
        precision = precision_summary(dtype, self.model_config, self._kv_dtype, config.state_dtype)
        computed = f"{precision} on {shown_name(self._platform)}"
        self.dtype_and_device = computed + ranks_summary(parallel)
        self._weight_pool = weight_pool(self._platform, self._device) if has_trainer else None
        with weights_in(self._weight_pool):
            self.model = self._load_model(config, source, parallel, dtype, may_release_kv=has_trainer)
            self._head = load_draft_head(config, source, self.model)
        self.kv_identity = make_kv_identity(config, self.model, computed)
        self._batch = InferBatch(
            self.model.req_manager,
            self.model.mem_manager.padding_slot,
            self._device,
            # batch-invariant attention does not use shared prefixes
            shares_prefixes=not config.deterministic and self.model.attends_to_shared_prefixes,
            has_kv=self.model.has_kv,
        )
        traits = ModelTraits(self.model.active_share, self.model.bytes_per_weight, self.model.fp8_share)
        self._profile = for_model(self._platform.profile(self._device), traits)
        self._step_limits = replace(self._profile.step_limits, max_running=self.model.req_manager.max_reqs)
        self._batch.lora_slots = config.num_loras
        self._state_block = DETERMINISTIC_BLOCK if config.deterministic else 1
        if self.model.model_kv_layout.states:
            self.model.set_kv_size(FIRST_POOL_TOKENS, state_rows=FIRST_STATE_ROWS)
            self._batch.enable_states()
        self.loras = LoraCache(self.model, config.max_lora_rank) if config.num_loras else None
        self._parallel = parallel
        self.kv_transfer = KvTransfer()
        self._init_steps(config, source)
        self._resize_kv_pool(config)  # it may run steps

    def add_cpu_offload(self, config: WorkerConfig, num_engines: int) -> None:
        """Keep evicted KV in host memory, if the operator wants it. ``num_engines`` share --kv_ram_gb."""
        if config.kv_ram_gb and self.pooling is not None:
            raise RuntimeError("a host tier of a pooling model passed the table of combinations")
        with explain_out_of_memory("lower kv_ram_gb"):
            self.cpu_offload = make_cpu_offload(
                config, self.model.mem_manager, self._platform, self._parallel, num_engines
            )

        rank, num_writers = self._parallel.rank_in_group, num_engines * config.num_groups
        self.storage_tiers = make_storage_backend(config, self.cpu_offload, self.kv_identity, rank, num_writers)

    def add_trainer_calls(self, config: WorkerConfig) -> None:
        """Let a trainer replace the weights, and use the memory of this worker."""
        self.weights = WeightUpdater(config, self.model, self._platform, self._parallel.rank, self._head)
        if self.pooling is None:
            self.memory = memory = WorkerMemory(
                self.model.mem_manager, self._weight_pool, self._runner, self._platform, self._device
            )
            self.weights.are_away = lambda: memory.released.weights

    def enable_images(self, memory: mmap | ArenaReader) -> None:
        """Requests may have images. ``memory``: where the encoder writes their embeddings."""
        arena = arena_of(self.model, memory)
        self._batch.images = BatchImages.of_model(self.model, arena, bool(self._head and self._head.reads_embeddings))
        self._runner.capture_images()

    @property
    def sight(self) -> Sight:
        """Of the tokens of prompts, if requests may have images."""
        return Sight.NONE if self._batch.images is None else self._batch.images.sight

    def add_kv_transfer(self, args: KvTransferArgs) -> None:
        """Send KV to decode engines, or receive it, as the role of the engine says."""
        if self.pooling is not None:
            raise RuntimeError("a role of a pooling model passed the table of combinations")
        rank = rank_of(exchanged_identity(self.kv_identity, self.model, len(self.kv_groups)), self.model, args.rank)
        self.kv_transfer = make_kv_transfer(args, self.model.mem_manager, self._platform, rank)

    @property
    def cpu_kv(self) -> CpuKvSize | None:
        if self.cpu_offload is None:
            return None
        names = () if self.storage_tiers is None else self.storage_tiers.names
        return self.cpu_offload.size(self._parallel.tp.size * self._parallel.pp.size, names)

    def _init_steps(self, config: WorkerConfig, source: ModelSource) -> None:
        """Create the parts that a step passes after the batch."""
        self._sampler = Sampler(
            self.model_config.vocab_size, self._device, self._batch.last_ids, self.model.gather_logits
        )
        self._grammars = GrammarManager(source, self.model_config.vocab_size, self._device)
        self._masks = GrammarMaskBuilder(self._grammars, self._device, self._platform.launches_async)
        self._runner = StepRunner(self.model, self._batch, self._platform)
        self._drafts = DraftRunner(
            self.model,
            self._batch,
            self._runner,
            config.speculation,
            # attention groups tell each other before a step how many tokens they have; so does the router all stages
            may_leave_out=not self._platform.launches_async and self._parallel.dp.size == self.model.pp.size == 1,
            head=self._head,
        )
        self._step_limits = replace(self._step_limits, leaves_out_drafts=self._drafts.leaves_out)
        self._collector = StepCollector()

    def _load_model(
        self, config: WorkerConfig, source: ModelSource, parallel: Parallel, dtype: torch.dtype, may_release_kv: bool
    ) -> TpPartBaseModel:
        """Load the model, with a KV pool that is just large enough to measure the memory that steps take."""
        has_weights = config.load_format == "auto"
        of_model = partial(without_head, config.speculation, self.model_config)
        running = max_running(config, self.model_config, self._platform, self._device, parallel)
        args = ModelArgs(
            config=self.model_config,
            dtype=activation_dtype(dtype, self.model_config),
            stored_dtype=dtype,
            device=self._device,
            parallel=parallel,
            checkpoint=of_model(with_progress(source, self.pooling)) if has_weights else None,
            max_total_token_num=FIRST_POOL_TOKENS,
            max_reqs=running,
            max_req_total_len=self.max_req_total_len,
            tensor_metadata=of_model(all_metadata(source, self.pooling)) if has_weights else (),
            kv_dtype=self._kv_dtype,
            state_dtype=getattr(torch, config.state_dtype),
            pooling=self.pooling,
            lora=lora_args(config),
            keeps_routed_experts=config.enable_return_routed_experts,
            take_kv_memory=memory_to_release(self._platform, self._device) if may_release_kv else None,
            packed_input_bits=config.packed_input_bits,
            merged_adapter=merged_adapter(config),
            source=source,
        )
        with explain_out_of_memory("use a smaller model, more ranks (tp), or a smaller max_req_total_len"):
            return get_model_class(self.model_config.model_type, self.model_config.is_of_transformers)(args)

    def _resize_kv_pool(self, config: WorkerConfig) -> None:
        remedy = "lower max_total_token_num, max_state_rows or mem_fraction"
        with explain_out_of_memory(remedy if self._batch.states else "lower max_total_token_num or mem_fraction"):
            self.model.set_kv_size(*kv_size(config, self.model, self._platform, self._launch_every_kernel))
        self._batch.use_slots_of(self.model)

    @property
    def step_limits(self) -> StepLimits:
        return self._step_limits

    @property
    def launch_lead_s(self) -> float:
        return self._profile.launch_lead_s

    @property
    def step_timeout_s(self) -> float:
        return self._platform.step_timeout_s

    @property
    def max_total_token_num(self) -> int:
        return self.model.mem_manager.size

    @property
    def kv_groups(self) -> tuple[KvGroupSize, ...]:
        """Those with pools of their own: the layers with a window may be one, and recurrent layers are the last."""
        window, memory = self.model.model_kv_layout.window or 1, self.model.mem_manager
        windows = [SlidingWindowKv(size, window, kept_tokens(window)) for size in memory.group_sizes]
        return (*windows, *([StateKv(memory.state_rows, self._state_block)] if memory.state_rows else []))

    @property
    def pooling_limits(self) -> PoolingLimits | None:
        """None: the model generates text."""
        return None

    @property
    def pipeline_depth(self) -> int:
        """How many steps should be in flight at once: one for every stage of a pipeline."""
        stages = self.model.pp.size
        return self._platform.pipeline_depth if stages == 1 else stages

    @property
    def longest_request(self) -> int:
        """Prompt plus output in tokens, of a request that has the pool for itself."""
        return min(self.max_req_total_len, self.max_total_token_num)

    def warm_up(self) -> None:
        """Run every kind of step once, so that no request waits for a compilation or a first allocation."""
        self._platform.compile_kernels(self._device, self._launch_every_kernel)
        self._run_warm_up_steps()
        self._grammars.warm_up()  # its thread would take a core from the steps
        self.capture()

    def capture(self) -> None:
        """Capture the steps that come often, if the device can replay them."""
        self._runner.capture()

    def _launch_every_kernel(self) -> None:
        with self.model.distinct_layers_only():
            self._run_warm_up_steps()
        self._runner.launch_every_shape()

    def _run_warm_up_steps(self) -> None:
        for step in self._warm_up_steps():
            self.run(step)
        for step in draft_steps(self._drafts.num_drafts, self.max_req_total_len, self._smallest_pool):
            self.run(self._in_all_pools(step))
        further = [with_adapter] if self._batch.lora_slots else []
        further += [with_image] if self.sight is Sight.IMAGE else []
        for with_more in further:
            for step in self._warm_up_steps():
                self.run(with_more(step))

    def _warm_up_steps(self) -> Iterator[Step]:
        max_reqs = self.model.req_manager.max_reqs
        max_reqs = min(max_reqs, self.model.mem_manager.state_rows or max_reqs)
        prompts = self._platform.warm_up_prompts
        for step in warm_up_steps(prompts, max_reqs, self.max_req_total_len, self._smallest_pool):
            yield self._in_all_pools(step)

    def _in_all_pools(self, step: Step) -> Step:
        memory = self.model.mem_manager
        return in_all_pools(step, len(memory.group_sizes), has_states=bool(memory.state_rows))

    @property
    def _smallest_pool(self) -> int:
        """In tokens."""
        return min([self.max_total_token_num, *self.model.mem_manager.group_sizes])

    def run(self, step: Step) -> StepResult:
        """Run a step and wait for its result."""
        return self.launch(step)()

    def reset(self) -> None:
        """Free all requests and forget the steps in flight. The device still finishes them before the next step."""
        self._collector = StepCollector()
        self._batch.clear()
        self._drafts.reset()

    def launch(self, step: Step) -> GetResult:
        """Start a step without waiting for the one before. Always call it from the same thread.

        It returns a function that waits for the step's result. Any thread may call that function.
        """
        get_result = self._launch(step)
        if self.kv_transfer.sender is not None:
            for send in self._of_group(step).sends:
                self.kv_transfer.sender.push(send)
        return get_result

    def _launch(self, step: Step) -> GetResult:
        self._platform.set_current(self._device)
        self._batch.apply(self._collector.take_updates())
        group_tokens = tuple(group.num_tokens for group in step.groups)
        step = self._of_group(step)
        self._update_batch(step)
        if not self.model.pp.is_last:
            self._drafts.take_lengths(step)
        if not step.num_rows:
            self._runner.run_empty(group_tokens)
            return StepResult
        if self._drafts.needs_tokens(step):
            self._wait_for_tokens()
        packed = self._batch.pack(self._drafts.planned(step), self._runner.captured_shape)
        shape = packed.shape._replace(group_tokens=group_tokens)
        if not self.model.pp.is_last:
            self._drafts.run_stage(packed, shape)
            return StepResult  # the last stage has the tokens
        draft_ids = None if packed.drafts is None else self._drafts.propose(packed)
        plan = self._sampler.prepare(packed.reqs if draft_ids is None else self._drafts.logit_reqs(packed, draft_ids))
        masks = self._masks.build(plan.constrained, self._wait_for_tokens)
        prompts = packed.prompt_logprobs(self._device)
        if draft_ids is not None:
            is_verified_later = masks is not None or bool(plan.sampler_reqs)
            out = self._drafts.run(packed, shape, prompts, draft_ids, is_verified_later)
            return self._launch_drafts(packed, out, plan, masks, step.next_drafts)
        out = self._runner.run(packed.inputs, shape, prompts, masks, packed.images)
        tokens, logprobs = self._sample(plan, out, masks)
        if plan.sampler_reqs:
            self._batch.last_ids.index_copy_(0, out.columns.reqs["row"][: len(tokens)].long(), tokens)
        self._drafts.record(out.columns, tokens)
        self._drafts.draft_next(packed, out, step.next_drafts)
        # after sampling: if a grammar forces tokens meanwhile, this step does not compute a request's last token
        sampled = self._batch.take_sampled(packed)
        proposals = self._drafts.propose_next(sampled, step.next_drafts)
        return self._collector.add(PendingStep(tokens, sampled, logprobs, proposals=proposals))

    def _of_group(self, step: Step) -> Step:
        """What this rank computes of a step, with the other ranks of its attention group."""
        return step.groups[self._parallel.dp.rank] if step.groups else step

    def _launch_drafts(
        self, packed: PackedStep, out: StepOut, plan: SamplingPlan, masks: StepMasks | None, next_drafts: int
    ) -> GetResult:
        """Sample after every draft of a step, and accept those drafts that were sampled."""
        if masks is not None:
            out = self._drafts.masked(out, masks)
        assert out.drafts is not None
        tokens, logprobs = self._sample(plan, out, masks, out.drafts.b_position[: len(plan.reqs)])
        counts = out.drafts.verified
        if counts is None or plan.sampler_reqs:
            counts = self._drafts.verify(out, tokens)
        self._drafts.advance_states(out, counts)
        self._drafts.draft_after(out, tokens, counts, next_drafts)
        sampled = self._batch.take_sampled(packed, out.columns.tokens["slot"])
        proposals = self._drafts.propose_next(sampled, next_drafts)
        return self._collector.add(PendingStep(tokens, sampled, logprobs, counts, proposals))

    def compile_grammar(self, command: CompileGrammar) -> None:
        """From any thread."""
        if not self.model.pp.is_last:
            return  # only the last stage samples
        with suppress(InvalidRequestError):  # the request fails with the error when it enters
            self._grammars.compile_grammar(command.grammar, command.eos_ids)

    def _update_batch(self, step: Step) -> None:
        self._batch.free(step)
        for new in step.new:
            self._add(self._batch.retained.whole(new))
        if step.loras and self.loras is not None:
            self.loras.fill_slots(step.loras)
        if self.cpu_offload is not None:
            for store in step.stores:
                self.cpu_offload.store(store)
            for load in step.loads:
                self.cpu_offload.start_load(load)
        if self.kv_transfer.receiver is not None:
            for recv in step.recvs:
                self.kv_transfer.receiver.expect(recv)

    def _add(self, new: NewReq) -> None:
        if not self.model.pp.is_last:
            self._batch.add(new)  # only the last stage samples
            return
        limit = new.sampling.thinking
        thinking = None if limit is None else ThinkingBudget(limit, self._grammars.token_bytes)
        self._batch.add(new, self._grammars.start(new), thinking)
        (req,) = self._batch.reqs_of(int64s([new.req_id]))
        self._drafts.add(req)

    def _wait_for_tokens(self) -> None:
        """Wait for all steps in flight, and apply their tokens."""
        self._collector.collect_all()
        self._batch.apply(self._collector.take_updates())

    @torch.inference_mode()
    def _sample(
        self, plan: SamplingPlan, out: StepOut, masks: StepMasks | None, b_position: Tensor | None = None
    ) -> tuple[Tensor, SampledLogprobs | None]:
        """A token for each row of the step's logits, and the requested logprobs. ``b_position``: see Sampler."""
        count = len(plan.reqs)
        tokens, logits = out.tokens[:count], out.logits[:count]
        if plan.sampler_reqs:
            if plan.needs_tokens_in_flight:
                self._wait_for_tokens()
            tokens = self._sampler.sample(plan, logits, tokens, masks, b_position)
        return tokens, self._sampler.logprobs(plan, tokens, logits)
