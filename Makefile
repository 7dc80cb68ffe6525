# Every target works on a fresh clone: the virtual environment .venv is made first if it is missing or out of date.
#
#   make demo          continue a novel with the small model in the package, and compare with full attention
#   make demo-real     an instruct model reads a chapter, answers questions about it, and continues it (MODEL=folder, GGUF, hub id)
#   make lint          ruff, mypy and the check of prose
#   make test          lint, site and tests; needs no GPU, and no network once installed
#   make quick         ruff and one case of each fast test in about a minute; PART=engine runs all tests of tests/unit/engine
#   make test-training the tests that train the small model (scripts/reference)
#   make stress        long tests, see STRESS_... below; PART=disk runs one part
#   make gpu           tests and measurements that need a CUDA device, in parts of under ten minutes; PART=tests|trace|kernels|
#                      decode|prefill|trained|accuracy|sessions runs one; GPU_PYTHON=python3 uses that environment instead of .venv
#   make bench         speed of a decode step, written to out/
#   make bench-real    prompt and decode times of trained models compared with transformers, written to eval/results/MODEL;
#                      MODEL=smollm2 runs one; BENCH_FLAGS='--runtimes all --gguf FILE' adds kvpress and llama.cpp if installed
#   make paper         the paper's tables and figures for the reference models, written to eval/results/ (half an hour on two
#                      cores; finished rows are reused)
#   make real          quality of selection on trained models, written to eval/results/MODEL; MODEL=smollm2 runs one model,
#                      PART=perplexity|divergence|needles|tasks|ruler|extraction one part; a part starts no row after 50 minutes
#   make docs          write the generated parts of the documentation, then make site
#   make site          the documentation as a site in out/docs, with warnings as errors

CONSTRAINTS ?= constraints.txt
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p --version >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.installed
OUT := out

export OMP_NUM_THREADS ?= 2

# Each process of the tests would compile all files again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-real docs site test quick test-training stress gpu bench bench-real paper real lint venv clean

venv: $(READY)

# Python compiles a module when it is first imported. Compiling all of them here would take 50 seconds.
$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c $(CONSTRAINTS) --editable '.[dev,eval]'
	touch $@

demo: $(READY)
	mkdir -p $(OUT)
	@echo "A test model of 6 million parameters (do not expect sensible prose) continues the novel The Black Arrow."
	$(BIN)/offload-rt generate reference --prompt-file offload_rt/data/black_arrow.txt --truncate tail --max-new-tokens 64 \
		--temperature 0.8 --top-p 0.95 --seed 1 --compare-full --plot $(OUT)/demo_plot.png --stats-json $(OUT)/demo.json

MODEL_FOLDER := $(or $(OFFLOAD_RT_MODELS),$(HOME)/.cache/offload-rt-models)

demo-real: $(READY)
	$(BIN)/python scripts/examples/read_chapter.py \
		--model $(or $(MODEL),$(wildcard $(MODEL_FOLDER)/smollm2),HuggingFaceTB/SmolLM2-135M-Instruct)

# LEVEL restricts our C code, torch, oneDNN and MKL to an instruction set: make test LEVEL=avx2.
LEVELS := scalar avx2 avx512
AT_scalar := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
AT_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
AT_avx512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512
ifneq ($(filter-out $(LEVELS),$(LEVEL))$(word 2,$(LEVEL)),)
$(error LEVEL=$(LEVEL) is unknown: one of $(LEVELS))
endif
AT_LEVEL := $(if $(LEVEL),OFFLOAD_RT_CPU_LEVEL=$(LEVEL) $(AT_$(LEVEL)))

# pytest's own command, not `python -m pytest`: the latter puts this folder on sys.path, where kernels/ would answer
# to `import kernels`, the name of another project's package.
test: $(READY)
	$(MAKE) -j2 lint site
	$(AT_LEVEL) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m 'not training'

# Files whose first cases take four fifths of the time of all first cases; PART=FOLDER runs them.
QUICK_WITHOUT := eval stress kernels/test_counted.py kernels/test_native.py kernels/test_select_kernels.py \
	policies/test_approximate_kv.py policies/test_scorer.py project/test_docs_snippets.py \
	$(addprefix cli/test_,chat.py cli.py cli_policies.py start_up.py write.py) \
	$(addprefix engine/test_,async_llm.py beam.py draft_model.py drop_in.py engine.py preemption.py sampling.py threads.py) \
	$(addprefix kv_cache/test_,block_allocator.py disk_extents.py disk_faults.py disk_pool.py eviction.py kv_format.py \
	layer_group_sessions.py layer_groups.py pool_eviction.py pool_properties.py snapshot_table.py) \
	$(addprefix model_runner/test_,batched.py exact.py exact_hybrids.py hybrids.py sharing.py snapshots.py sparse_decode.py \
	trained_hybrid.py) \
	$(addprefix models/test_,architectures.py gemma4_compositions.py importers.py latent_packed.py multimodal.py mxfp4.py packed.py packed_composition.py \
	packed_weights.py) \
	$(addprefix server/test_server_,agents.py docs.py engine.py protocol_gaps.py protocols.py sessions.py) \
	$(addprefix sessions/test_,async_sessions.py compatibility.py hybrid_sessions.py look_ahead.py prefix_store.py prompt_marks.py \
	reliability.py session_limits.py sessions.py shared_states.py truncation.py turn_queue.py) \
	$(addprefix transfer/test_,cuda_graphs.py cuda_path.py cuda_waits.py device_copies.py device_graphs.py device_limit.py device_memory.py host_table.py hybrid_graphs.py \
	latent_cuda.py packed_cuda.py prefill_counts.py step_counts.py weight_placement.py working_set.py)
QUICK := $(if $(PART),tests/unit/$(PART),tests $(addprefix --ignore tests/unit/,$(QUICK_WITHOUT)))

quick: $(READY)
	$(BIN)/ruff check .
	$(AT_LEVEL) OMP_NUM_THREADS=1 $(if $(PART),,OFFLOAD_RT_QUICK=1) $(BIN)/pytest -q -n 2 --dist worksteal -m 'not training and not slow' $(QUICK)

test-training: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m training

# Names of the parts of `make stress`. Server parts also test LangChain, litellm, llm, schemathesis, llm-comply and ray if installed.
STRESS_PARTS := disk sampled sessions composition requests architectures cuda gpu kernels api files faults growth day server agents adversary page ray neon wheel
# Kill 200 processes while they write blocks; fail every write once; a million tokens in little memory.
STRESS_disk := tests/unit/kv_cache/test_disk.py tests/unit/kv_cache/test_disk_faults.py tests/unit/kv_cache/test_disk_resident.py
# Every case of the tests of which `make test` runs a sample, and more examples of state machines.
STRESS_sampled := tests/unit/kv_cache/test_pool_properties.py tests/unit/sessions/test_prompt_marks.py \
	$(sort $(shell grep -rlE "mark.sampled|support.sampling" --include=*.py tests/unit))
# Kill 50 processes while they save sessions; flip 100 bits; continue in other processes.
STRESS_sessions := tests/unit/sessions/test_reliability.py tests/unit/sessions/test_hybrid_sessions.py \
	tests/unit/sessions/test_portability.py tests/unit/cli/test_processes.py
# Each model with each policy, feature and beam search.
STRESS_composition := tests/unit/model_runner/test_sparse_decode.py tests/unit/model_runner/test_composition.py tests/unit/model_runner/test_exactness.py tests/unit/engine/test_beam.py \
	tests/unit/model_runner/test_in_place.py tests/unit/transfer/test_cuda_graphs.py tests/unit/eval/test_eval_paper.py tests/unit/eval/test_eval_real_speed.py
# 500 requests in a pool that is too small for them.
STRESS_requests := tests/unit/model_runner/test_sharing.py tests/unit/engine/test_async_llm.py
# Every architecture, GGUF files, and transformers' generate.
STRESS_architectures := tests/unit/models/test_architectures.py tests/unit/models/test_verification.py tests/unit/model_runner/test_snapshots.py tests/unit/sessions/test_architecture_sessions.py tests/unit/models/test_gguf.py tests/unit/engine/test_drop_in.py
# Everything on the simulated CUDA device, under every schedule.
STRESS_cuda := tests/unit/transfer/test_cuda_path.py tests/unit/transfer/test_cuda_waits.py tests/unit/transfer/test_device_copies.py tests/unit/transfer/test_device_memory.py tests/unit/transfer/test_gpu_room.py tests/unit/transfer/test_device_limit.py \
	tests/unit/transfer/test_gpu_streams.py tests/unit/transfer/test_weight_placement.py tests/unit/transfer/test_step_counts.py tests/unit/transfer/test_hybrid_graphs.py
# Tests marked gpu, on a CUDA device.
STRESS_gpu := $(filter-out tests/unit/kernels/test_triton_compile.py,$(wildcard tests/unit/kernels/test_triton_*.py tests/unit/*/test_select_*.py)) \
	tests/unit/kernels/test_attention.py tests/unit/kernels/test_counted.py tests/unit/transfer/test_links.py
# Compile all Triton kernels for four GPUs.
STRESS_kernels := $(addprefix tests/unit/kernels/test_,triton_compile.py predicted_step.py native.py)
# 100,000 random values and calls; 77,000 damaged files; every file system call fails; memory does not grow.
STRESS_api := tests/unit/stress/test_fuzz_api.py
STRESS_files := tests/unit/stress/test_fuzz_files.py
STRESS_faults := tests/unit/stress/test_failing_files.py tests/unit/stress/test_memory_limit.py
STRESS_growth := tests/unit/stress/test_growth.py
# 2,000 sessions come and go for ten minutes (DAY_SECONDS).
STRESS_day := tests/unit/stress/test_day.py
# 9,000 malformed requests, 10,000 requests over 32 connections, client libraries.
STRESS_server := tests/unit/server/test_server_fuzz.py tests/unit/server/test_tool_parsers.py tests/unit/server/test_server_clients.py
# Requests of coding agents.
STRESS_agents := tests/unit/server/test_server_agents.py
# Random cases against oracles, for ADVERSARY_SECONDS each; a failing case is printed as a command.
STRESS_adversary := tests/unit/stress/test_adversary.py
# The chat page in a headless Chromium; two replicas with ray.
STRESS_page := tests/unit/server/test_page.py tests/unit/server/test_page_views.py
STRESS_ray := tests/unit/server/test_ray.py
# C kernels for Arm under qemu, if it and the cross compiler are installed; the wheel.
STRESS_neon := tests/unit/stress/test_neon.py
STRESS_wheel := tests/unit/project/test_packaging.py
STRESS := $(or $(PART),$(STRESS_PARTS))

stress: $(READY)
	$(foreach part,$(filter-out $(STRESS_PARTS),$(STRESS)),$(error PART=$(part) is unknown: one of $(STRESS_PARTS)))
	$(AT_LEVEL) OMP_NUM_THREADS=1 OFFLOAD_RT_STRESS=200 OFFLOAD_RT_CELLS=1 OFFLOAD_RT_FUZZ=100000 OFFLOAD_RT_SCHEDULES=all $(BIN)/pytest --timeout 1800 $(foreach part,$(STRESS),$(STRESS_$(part)))

GPU_READY := $(if $(GPU_PYTHON),.gpu-installed,$(READY))

.gpu-installed: pyproject.toml
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	touch $@

gpu: $(GPU_READY)
	$(or $(GPU_PYTHON),$(BIN)/python) -P -m offload_rt eval gpu $(if $(PART),--part $(PART)) $(GPU_FLAGS)

bench: $(READY)
	mkdir -p $(OUT)
	$(BIN)/offload-rt bench --out $(OUT) $(BENCH_FLAGS)

# If OFFLOAD_RT_DATA has no held-out book and no task files, only the novel in the package is used.
DATA := $(or $(OFFLOAD_RT_DATA),../shared/data)
HELD_OUT := $(wildcard $(DATA)/books/war_and_peace.txt)

PROCESSES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

paper: $(READY)
	HF_HUB_OFFLINE=1 OFFLOAD_RT_DATA=$(DATA) OMP_NUM_THREADS=1 $(BIN)/offload-rt eval paper \
		--models reference reference-opt --processes $(PROCESSES) --out eval/results \
		$(if $(HELD_OUT),--book $(HELD_OUT) --tasks)

bench-real: $(READY)
	$(if $(wildcard $(GET_MODELS)),$(BIN)/python $(GET_MODELS) $(MODELS))
	$(foreach model,$(MODELS),HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/offload-rt eval real-speed \
		$(or $(wildcard $(MODEL_FOLDER)/$(model)),$(model)) --out eval/results/$(notdir $(model)) \
		--text $(or $(HELD_OUT),offload_rt/data/black_arrow.txt) $(BENCH_FLAGS) &&) true

docs: $(READY)
	$(BIN)/python docs/results.py
	$(BIN)/python docs/figures.py
	$(MAKE) site

# With --quiet, mkdocs does not count warnings, and --strict has no effect.
site: $(READY)
	$(BIN)/python docs/structure.py docs/pages/structure.svg
	$(BIN)/python docs/commands.py docs/pages/reference/commands.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/mkdocs.yml

# Trained models. If the script GET_MODELS exists, it downloads them once.
MODELS := $(or $(MODEL),smollm2 qwen)
GET_MODELS ?= ../shared/tools/get_models.py

real: $(READY)
	$(if $(wildcard $(GET_MODELS)),$(BIN)/python $(GET_MODELS) $(MODELS))
	HF_HUB_OFFLINE=1 OFFLOAD_RT_DATA=$(DATA) $(BIN)/offload-rt eval real --models $(MODELS) \
		$(if $(PART),--parts $(PART)) $(REAL_FLAGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/prose.py

clean:
	rm -rf .venv $(OUT) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
