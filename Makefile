# Every target works on a fresh clone: the virtual environment is made first where it is missing or out of date.
#   make demo    continue a real book with the model that ships in the package, and compare with full attention
#   make test    lint, types and tests (needs no GPU, no network once installed)
#   make quick   ruff and one case of each test in about a minute; PART=engine runs all tests of tests/unit/engine
#   make test-training  the tests of scripts/reference that train
#   make stress    the long ones, in parts of a few minutes: PART=disk (200 kills while blocks are written, 100 over
#                contexts on disk, whose every write fails once, and a million tokens' resident memory), sessions (50 kills
#                while sessions are saved, 100 flipped bits), composition (every cell of the matrix, each
#                model with each policy and scorer, each beam search), requests (500 in a pool too small for them),
#                cuda (all that is run on a simulated device, under every schedule), gpu (tests marked gpu, there),
#                kernels (all of them compiled for four GPUs), api (100,000 values and calls at random),
#                files (85,000 times, files that are read are damaged first), faults (any call of a file system fails),
#                day (sessions come and go for ten minutes: DAY_SECONDS),
#                server (9,000 requests that are wrong in one place, answers cut anywhere, 10,000 over 32 connections,
#                LangChain, litellm, llm, schemathesis and llm-comply where they are installed),
#                agents (requests of coding agents and a chat page: cached tokens, before and after a restart,
#                a store that is too small, the script of a client without sessions),
#                attack (half-open connections and clients that do not read, beside normal traffic),
#                adversary (random cases against oracles, ADVERSARY_SECONDS for each of its parts; a failing one is
#                printed as a command), page (the server's page in a headless Chromium), ray (two replicas, two engines of a batch, where ray is installed),
#                neon (C kernels for Arm under qemu, where its user emulation and the cross compiler are installed) runs one
#   make gpu     all that needs a CUDA device, in parts of under ten minutes: PART=tests|trace|kernels|decode|prefill|trained|
#                accuracy|sessions runs one; GPU_PYTHON=python3 takes that environment instead of making one
#   make bench   the speed measurements, written to out/
#   make bench-real  trained models' prompts and steps beside transformers' (MODEL=smollm2 runs one), to eval/results/MODEL;
#                BENCH_FLAGS='--runtimes all --gguf FILE' for kvpress and llama.cpp too, where their packages are installed
#   make paper   counterparts of the paper's tables and figures for the reference models, written to eval/results/
#                (about half an hour on two cores; what is done is not done again)
#   make real    quality loss of selection on trained models (MODEL=smollm2 runs one), written to eval/results/MODEL; in
#                parts that begin nothing new after 50 minutes: PART=perplexity|divergence|needles|tasks|ruler|extraction
#   make docs    write the generated pages of the documentation, then make site
#   make site    the documentation as a site in out/docs, warnings as errors; part of make test
#   make demo-real   an instruct model reads a chapter, answers questions about it, continues it (MODEL=folder, GGUF, hub id)
#   make lint    ruff, mypy and the check of prose

CONSTRAINTS ?= constraints.txt
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p --version >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.installed
OUT := out

export OMP_NUM_THREADS ?= 2

.PHONY: demo demo-real docs site test quick test-training stress gpu bench bench-real paper real lint venv clean

venv: $(READY)

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) --editable '.[dev,eval]'
	touch $@

demo: $(READY)
	mkdir -p $(OUT)
	$(BIN)/offload-rt generate reference --prompt-file offload_rt/data/black_arrow.txt --truncate tail --max-new-tokens 64 \
		--temperature 0.8 --top-p 0.95 --seed 1 --compare-full --plot $(OUT)/demo_plot.png --stats-json $(OUT)/demo.json

MODEL_FOLDER := $(or $(OFFLOAD_RT_MODELS),$(HOME)/.cache/offload-rt-models)

demo-real: $(READY)
	$(BIN)/python scripts/examples/read_chapter.py \
		--model $(or $(MODEL),$(wildcard $(MODEL_FOLDER)/smollm2),HuggingFaceTB/SmolLM2-135M-Instruct)

# pytest's own command, not `python -m pytest`: the latter puts this folder on sys.path, where kernels/ would answer
# to `import kernels`, the name of another project's package.
test: $(READY)
	$(MAKE) -j2 lint site
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m 'not training'

QUICK := $(if $(PART),tests/unit/$(PART),tests --ignore tests/unit/eval --ignore tests/unit/stress)

quick: $(READY)
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(if $(PART),,OFFLOAD_RT_QUICK=1) $(BIN)/pytest -q -n 2 --dist worksteal -m 'not training and not slow' $(QUICK)

test-training: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m training

STRESS_PARTS := disk sessions composition requests architectures cuda gpu kernels api files faults growth day server agents attack adversary page ray neon wheel
STRESS_disk := tests/unit/kv_cache/test_disk.py tests/unit/kv_cache/test_disk_faults.py tests/unit/kv_cache/test_disk_resident.py
STRESS_sessions := tests/unit/sessions/test_reliability.py tests/unit/sessions/test_hybrid_sessions.py
STRESS_composition := tests/unit/model_runner/test_sparse_decode.py tests/unit/model_runner/test_composition.py tests/unit/model_runner/test_exactness.py tests/unit/engine/test_beam.py \
	tests/unit/transfer/test_cuda_graphs.py tests/unit/eval/test_eval_paper.py tests/unit/eval/test_eval_real_speed.py
STRESS_requests := tests/unit/model_runner/test_sharing.py tests/unit/engine/test_async_llm.py
STRESS_server := tests/unit/server/test_server_fuzz.py tests/unit/server/test_server_parsers.py tests/unit/server/test_tool_parsers.py tests/unit/server/test_server_clients.py
STRESS_agents := tests/unit/server/test_server_agents.py
STRESS_attack := tests/unit/server/test_server_attack.py
STRESS_page := tests/unit/server/test_page.py tests/unit/server/test_page_views.py
STRESS_adversary := tests/unit/stress/test_adversary.py
STRESS_ray := tests/unit/server/test_ray.py
STRESS_wheel := tests/unit/project/test_packaging.py
STRESS_architectures := tests/unit/models/test_architectures.py tests/unit/model_runner/test_snapshots.py tests/unit/sessions/test_architecture_sessions.py tests/unit/models/test_gguf.py tests/unit/engine/test_drop_in.py
STRESS_cuda := tests/unit/transfer/test_cuda_path.py tests/unit/transfer/test_device_memory.py tests/unit/transfer/test_gpu_room.py tests/unit/transfer/test_device_limit.py \
	tests/unit/transfer/test_gpu_streams.py tests/unit/transfer/test_weight_placement.py tests/unit/transfer/test_step_counts.py
STRESS_gpu := $(filter-out tests/unit/kernels/test_triton_compile.py,$(wildcard tests/unit/kernels/test_triton_*.py tests/unit/*/test_select_*.py)) \
	tests/unit/kernels/test_attention.py tests/unit/kernels/test_counted.py tests/unit/transfer/test_links.py
STRESS_kernels := tests/unit/kernels/test_triton_compile.py
STRESS_api := tests/unit/stress/test_fuzz_api.py
STRESS_files := tests/unit/stress/test_fuzz_files.py
STRESS_faults := tests/unit/stress/test_failing_files.py tests/unit/stress/test_memory_limit.py
STRESS_growth := tests/unit/stress/test_growth.py
STRESS_day := tests/unit/stress/test_day.py
STRESS_neon := tests/unit/stress/test_neon.py
STRESS := $(or $(PART),$(STRESS_PARTS))

stress: $(READY)
	$(foreach part,$(filter-out $(STRESS_PARTS),$(STRESS)),$(error PART=$(part) is unknown: one of $(STRESS_PARTS)))
	OMP_NUM_THREADS=1 OFFLOAD_RT_STRESS=200 OFFLOAD_RT_CELLS=1 OFFLOAD_RT_FUZZ=100000 OFFLOAD_RT_SCHEDULES=all $(BIN)/pytest --timeout 1800 $(foreach part,$(STRESS),$(STRESS_$(part)))

GPU_READY := $(if $(GPU_PYTHON),.gpu-installed,$(READY))

.gpu-installed: pyproject.toml
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	touch $@

gpu: $(GPU_READY)
	$(or $(GPU_PYTHON),$(BIN)/python) -P -m offload_rt eval gpu $(if $(PART),--part $(PART)) $(GPU_FLAGS)

bench: $(READY)
	mkdir -p $(OUT)
	$(BIN)/offload-rt bench --out $(OUT) $(BENCH_FLAGS)

# The held-out book and the harness' tasks where they are (OFFLOAD_RT_DATA), else the packaged text alone.
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
	$(BIN)/python docs/structure.py docs/pages/structure.svg
	$(BIN)/python docs/commands.py docs/pages/reference/commands.md
	$(BIN)/python docs/results.py
	$(BIN)/python docs/figures.py
	$(MAKE) site

site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f docs/mkdocs.yml

# Trained models: fetched once by the tool of GET_MODELS where it is at hand.
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
