"""Recurrent state of hybrid models, and the decoder layers that use it.

For layers without attention, transformers' own modules are called. They get a `RecurrentState` instead of transformers'
cache. The modules for linear attention, Mamba-2 and short convolutions call only five methods of the cache, which
`RecurrentState` provides.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core import ModelGeometry, StateShape
from ..errors import ModelError
from ..kernels.h2d_copy import to_device
from .weights import attention_of


class StateSlots:
    """Recurrent states of all running sequences. Each sequence has one slot, which is the same in all layers.

    The lowest free slot is used first, so that the sequences of a batch usually have adjacent slots and need no copy.
    """

    def __init__(self, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = geometry.states, dtype, device
        self._size = 0
        self._free: set[int] = set()
        self.conv: dict[int, torch.Tensor] = {}
        self.recurrent: dict[int, torch.Tensor] = {}
        # Number of tokens that each layer has processed, by slot. If a layer runs twice or skips tokens, its state is
        # wrong, but the effect becomes visible only hundreds of tokens later.
        self.processed: dict[int, list[int]] = {shape.layer: [] for shape in self._shapes}
        self._grow(0)

    @property
    def size(self) -> int:
        """Number of slots, including free slots. When it grows, all states move to other addresses."""
        return self._size

    @property
    def used(self) -> int:
        return self._size - len(self._free)

    @property
    def spare(self) -> int | None:
        """A free slot, or None if all slots are in use. Padding of batches may overwrite its state."""
        return min(self._free, default=None)

    @property
    def bytes(self) -> int:
        return sum(states.nbytes for tensors in (self.conv, self.recurrent) for states in tensors.values())

    def allocate(self, origin: int | None = None) -> int:
        """Allocate a slot. Initialise it with a copy of slot `origin`, or with zeros if `origin` is None."""
        if not self._free:
            self._grow(self._size + max(1, self._size // 4))
        slot = min(self._free)
        if origin is not None:
            self.copy(slot, self, origin)
        else:
            for states in (*self.conv.values(), *self.recurrent.values()):
                states[slot] = 0
            for counts in self.processed.values():
                counts[slot] = 0
        self._free.remove(slot)
        return slot

    def copy(self, slot: int, source: StateSlots, origin: int) -> None:
        for targets, sources in ((self.conv, source.conv), (self.recurrent, source.recurrent)):
            for layer, states in targets.items():
                states[slot] = sources[layer][origin]
        for layer, counts in self.processed.items():
            counts[slot] = source.processed[layer][origin]

    def release(self, slot: int) -> None:
        assert 0 <= slot < self._size and slot not in self._free
        self._free.add(slot)

    def view(
        self,
        slots: Sequence[int],
        on_finished: Callable[[int], None] = lambda layer: None,
        *,
        counts: Sequence[int] | None = None,
    ) -> RecurrentState:
        """Return the state for one step with the sequences in `slots`, in this order.

        Args:
            on_finished: Called with the index of a decoder layer after the layer's new state has been stored.
            counts: Number of tokens of each sequence in this step. None if all sequences have the same number.
        """
        assert not self._free.intersection(slots) and len(set(slots)) == len(slots)
        return RecurrentState(self, slots, on_finished, counts=counts)

    def gather(self, index: torch.Tensor, on_finished: Callable[[int], None]) -> RecurrentState:
        """Return the state for one step with the sequences whose slots are in `index`, int64 `[B]` on the device.

        Each layer reads `index` when it runs, so that a CUDA graph can replay the layer for other sequences. Padding
        may repeat a slot. Tokens are not counted (see `add_processed`).
        """
        return RecurrentState(self, (), on_finished, index=index)

    def add_processed(self, layer: int, slots: Sequence[int], tokens: int) -> None:
        """Count `tokens` tokens as processed by decoder layer `layer` for each sequence in `slots`."""
        counts = self.processed[layer]
        for slot in slots:
            counts[slot] += tokens

    def layer_state(self, layer: int, slot: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return views of a decoder layer's recurrent state (None if it has none) and convolution state in a slot."""
        return self.recurrent[layer][slot] if layer in self.recurrent else None, self.conv[layer][slot]

    def check(self, slot: int, tokens: int) -> None:
        """Assert that every layer has processed exactly the first `tokens` tokens of the sequence in `slot`."""
        wrong = {layer: counts[slot] for layer, counts in self.processed.items() if counts[slot] != tokens}
        assert not wrong, f"recurrent layers saw {wrong} tokens instead of {tokens}"

    def check_integrity(self) -> None:
        assert self._free <= set(range(self._size))
        assert self.conv.keys() == self.processed.keys() >= self.recurrent.keys()
        assert all(len(states) == self._size for states in (*self.conv.values(), *self.recurrent.values()))
        assert all(len(counts) == self._size for counts in self.processed.values())

    def _grow(self, size: int) -> None:
        # All tensors are allocated first, so that nothing has changed if memory runs out.
        conv = {
            shape.layer: self._resized(self.conv, shape.layer, (size, *shape.conv), self._dtype)
            for shape in self._shapes
        }
        recurrent = {
            shape.layer: self._resized(self.recurrent, shape.layer, (size, *shape.recurrent), torch.float32)
            for shape in self._shapes
            if shape.recurrent
        }
        self.conv, self.recurrent = conv, recurrent
        for counts in self.processed.values():
            counts += [0] * (size - self._size)
        self._free.update(range(self._size, size))
        self._size = size

    def _resized(
        self, tensors: dict[int, torch.Tensor], layer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        states = torch.empty(shape, dtype=dtype, device=self._device)
        if layer in tensors:
            states[: self._size] = tensors[layer]
        states[self._size :] = 0  # padding reads free slots, and must not compute with NaN
        return states


class RecurrentState:
    """Recurrent state of the sequences in one step. transformers' modules use it as their cache.

    If the slots are adjacent, the state is a view of them. Otherwise it is a copy, which `finish` writes back.

    Attributes:
        sequences: Number of sequences in the step, including padding.
        inputs: Recorded inputs `[T, D]` of the recurrent mixers in this step, by decoder layer. None if inputs are not
            recorded.
    """

    def __init__(
        self,
        owner: StateSlots,
        slots: Sequence[int],
        on_finished: Callable[[int], None] = lambda layer: None,
        *,
        counts: Sequence[int] | None = None,
        index: torch.Tensor | None = None,
    ) -> None:
        self._owner, self._slots, self._finished = owner, list(slots), on_finished
        self.sequences = len(slots) if index is None else len(index)
        self.inputs: dict[int, torch.Tensor] | None = None
        self._groups: list[tuple[slice, RecurrentState]] = []
        if counts is not None and len(set(counts)) > 1:
            first = start = 0
            for count, members in itertools.groupby(counts):
                last = first + len(list(members))
                group = RecurrentState(owner, self._slots[first:last], on_finished)
                stop = start + count * (last - first)
                self._groups.append((slice(start, stop), group))
                first, start = last, stop
        self._adjacent = index is None and self._slots == list(range(self._slots[0], self._slots[0] + len(slots)))
        self._index = index
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._current: dict[tuple[str, int], torch.Tensor] = {}

    def groups(self) -> Iterator[tuple[slice, RecurrentState]]:
        """Yield groups of adjacent sequences that have the same number of tokens in this step.

        Each item consists of the group's slice of the step's T tokens, and the group's state.
        """
        if self._groups:
            yield from self._groups
        else:
            yield slice(None), self

    def finish(self, layer: int, tokens: int) -> None:
        """Store the state of decoder layer `layer` after it has processed `tokens` tokens of each sequence."""
        for states, copied in self._copies:
            states[self._slot_index(states)] = copied
        self._copies.clear()
        self._current.clear()
        if layer in self._owner.processed:
            self._owner.add_processed(layer, self._slots, tokens)
            self._finished(layer)

    def _state(self, kind: str, layer: int) -> torch.Tensor:
        """Return the convolution or recurrent state `[B, ...]` of a layer.

        Callers may modify it until they call `finish`.
        """
        if (kind, layer) not in self._current:
            states: torch.Tensor = getattr(self._owner, kind)[layer]
            if self._adjacent:
                current = states[self._slots[0] : self._slots[-1] + 1]
            else:
                current = states[self._slot_index(states)]
                self._copies.append((states, current))
            self._current[kind, layer] = current
        return self._current[kind, layer]

    def _slot_index(self, states: torch.Tensor) -> torch.Tensor:
        # If the index were a list, torch would copy it to the device for each tensor, and the host would wait for each
        # copy.
        if self._index is None:
            self._index = to_device(torch.tensor(self._slots), states.device)
        return self._index

    # ------------------------------------------------------------------------- transformers' cache protocol

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the latest inputs of a layer's convolution, `[B, channels, kernel]` (zeros before the first token)."""
        return self._state("conv", layer_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the recurrent state of a layer, `[B, ...]` (zeros before the first token)."""
        return self._state("recurrent", layer_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **options: Any) -> torch.Tensor:
        """Append convolution inputs `[B, channels, T]`.

        Return the old and the new inputs, `[B, channels, kernel + T]`.
        """
        state = self._state("conv", layer_idx)
        inputs = torch.cat([state, conv_states.to(state.dtype)], dim=-1)
        state.copy_(inputs[..., -state.shape[-1] :])
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **options: Any) -> torch.Tensor:
        state = self._state("recurrent", layer_idx)
        assert state.shape == recurrent_states.shape
        return state.copy_(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(frozen=True)
class Stage:
    """A decoder layer without attention. Every token must pass through it exactly once.

    `run` computes the layer's output `[T, D]` from its input.
    """

    layer: int
    run: Callable[[torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class RollbackState:
    """A copy of a sequence's recurrent state. It is restored if draft tokens are rejected."""

    slot: int
    tokens: int = 0  # length of the sequence in tokens when the copy was made
    # For each decoder layer, the inputs `[n, D]` of its recurrent mixer for the n tokens after the copy. The state
    # after the accepted tokens is computed from them. None if inputs are not recorded.
    inputs: dict[int, torch.Tensor] | None = field(default=None, repr=False)


def run_layer(module: Any, layer: int, hidden: torch.Tensor, state: RecurrentState | None) -> torch.Tensor:
    """Run a decoder layer without attention on `hidden` `[T, D]`. Return its output `[T, D]`.

    `module` can also be a recurrent mixer that runs in parallel with attention (Falcon-H1).
    """
    if state is None:
        return _call(module, hidden, 1, None)
    recorder = None if state.inputs is None else _InputRecorder(module)
    outputs = []
    for rows, group in state.groups():
        x = hidden[rows]
        with nullcontext() if recorder is None else recorder.recording(group):
            outputs.append(_call(module, x, group.sequences, group))
        group.finish(layer, len(x) // group.sequences)
    if state.inputs is not None and recorder is not None and recorder.inputs:
        state.inputs[layer] = _concatenated(recorder.inputs)
    return _concatenated(outputs)


def _call(module: Any, hidden: torch.Tensor, sequences: int, state: RecurrentState | None) -> torch.Tensor:
    parameters = inspect.signature(module.forward).parameters
    kwargs: dict[str, Any] = {"attention_mask": None, "position_ids": None, "position_embeddings": None}
    kwargs |= {"past_key_values": state, "cache_params": state}
    out = module(
        hidden.view(sequences, -1, hidden.shape[-1]),
        **{name: value for name, value in kwargs.items() if name in parameters},
    )
    output: torch.Tensor = (out[0] if isinstance(out, tuple) else out).view_as(hidden)
    return output


def _concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _InputRecorder:
    def __init__(self, module: nn.Module) -> None:
        self._mixer = recurrent_mixer(module)
        self.inputs: list[torch.Tensor] = []

    def recording(self, state: RecurrentState) -> Any:

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            # Other threads may call the same module, even before torch has registered that the hook takes keyword
            # arguments.
            kwargs = kwargs or {}
            if any(argument is state for argument in (*args, *kwargs.values())):
                x = args[0] if args else kwargs["hidden_states"]
                self.inputs.append(x.flatten(0, 1).clone())  # the caller may overwrite it in place

        return nullcontext() if self._mixer is None else self._mixer.register_forward_pre_hook(keep, with_kwargs=True)


def state_shapes(name: str, layers: Sequence[nn.Module], attention_indices: Sequence[int]) -> tuple[StateShape, ...]:
    """Return the shapes of a sequence's recurrent states, one for each decoder layer.

    `attention_indices` are the indices of the decoder layers with attention. If there is no such layer, or a state is
    not supported, raise a ModelError that mentions the model class `name`.
    """
    mixers = {i: mixer for i, layer in enumerate(layers) if (mixer := recurrent_mixer(layer)) is not None}
    kinds = ", ".join(sorted({type(mixer).__name__ for mixer in mixers.values()}))
    recurrent = f"{len(mixers)} of the {len(layers)} layers of {name} are recurrent ({kinds})"
    if attention_of(layers[attention_indices[0]]) is None:
        why = f"; {recurrent}" if mixers else ""
        raise ModelError(f"none of the {len(layers)} layers of {name} has an attention module{why}", reason="modules")
    shapes = []
    for i, mixer in mixers.items():
        shape = _shape_of(mixer)
        if shape is None:
            raise ModelError(f"{recurrent}, which is a kind that is not supported", reason="recurrent")
        shapes.append(StateShape(i, sum(index <= i for index in attention_indices) - 1, *shape))
    return tuple(shapes)


def _shape_of(mixer: Any) -> tuple[tuple[int, int], tuple[int, ...]] | None:
    conv, kernel = _convolution(mixer), getattr(mixer, "conv_kernel_size", None)
    if conv is None or kernel is None:
        return None
    shape = conv.in_channels, int(kernel)
    if all(hasattr(mixer, name) for name in ("num_v_heads", "head_k_dim", "head_v_dim")):  # gated delta rule
        return shape, (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
    if all(hasattr(mixer, name) for name in ("num_heads", "head_dim", "forget_gate")):  # Kimi Delta Attention
        return shape, (mixer.num_heads, mixer.head_dim, mixer.head_dim)
    if all(hasattr(mixer, name) for name in ("num_heads", "head_dim", "ssm_state_size")):  # Mamba-2
        return shape, (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    if any(hasattr(mixer, name) for name in ("A_log", "dt_bias", "ssm_state_size")):
        return None
    return shape, ()  # short convolution


def recurrent_mixer(layer: nn.Module) -> nn.Module | None:
    """Return the submodule of a decoder layer that has recurrent state (recognised by its convolution), or None."""
    return next((module for module in layer.modules() if _convolution(module) is not None), None)


def _convolution(module: nn.Module) -> nn.Conv1d | None:
    candidates = (getattr(module, name, None) for name in ("conv1d", "conv", "conv_1d", "q_conv1d"))
    return next((conv for conv in candidates if isinstance(conv, nn.Conv1d)), None)
