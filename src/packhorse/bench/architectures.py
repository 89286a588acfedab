"""The zoo: about 80 architectures as tiny models of each kind, with dropout on and batches as users give them (masks with padding, labels to ignore).

Hugging Face models are unmodified and come from their configuration alone (extra `hf`).
B 2, T 16 tokens, V 96.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH = 96, 32


@dataclass(frozen=True)
class Architecture:
    """name -> a model to train and one batch for it, as keyword arguments."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]


# -- batches ------------------------------------------------------------------------------------------------------------------------


def _tokens(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def _mask() -> Tensor:
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0
    return mask


def _text() -> dict[str, Any]:
    """Two sequences, the second padded; the padding is ignored by the loss."""
    ids, mask = _tokens(), _mask()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def _text_alone() -> dict[str, Any]:
    ids = _tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def _pairs() -> dict[str, Any]:
    ids = _tokens()
    return {"ids": ids, "labels": ids.roll(1, 1)}


def _pixels(side: int = 32) -> Callable[[], dict[str, Any]]:
    def batch() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.randn(2, 3, side, side, generator=generator), "labels": torch.randint(0, 10, (2,), generator=generator)}

    return batch


def _images() -> dict[str, Any]:
    batch = _pixels()()
    return {"images": batch["pixel_values"], "labels": batch["labels"]}


def _sound(labels: int | None) -> Callable[[], dict[str, Any]]:
    def batch() -> dict[str, Any]:
        wave = torch.randn(2, 800, generator=torch.Generator().manual_seed(0))
        return {"input_values": wave, "labels": torch.tensor([1, 0]) if labels is None else _tokens(2, labels)}

    return batch


def _spectrum(shape: tuple[int, int], name: str, words: bool) -> Callable[[], dict[str, Any]]:
    def batch() -> dict[str, Any]:
        features = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        return {name: features, "labels": _tokens(2, 8) if words else torch.tensor([1, 0])}

    return batch


def _text_and_pixels() -> dict[str, Any]:
    return {"input_ids": _tokens(), "attention_mask": _mask(), "pixel_values": _pixels()()["pixel_values"], "return_loss": True}


# -- Hugging Face -------------------------------------------------------------------------------------------------------------------

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "attention_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_OLD: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_BOTH: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "dropout": 0.1,
}  # fmt: skip
_BOTH_64 = {**_BOTH, "max_position_embeddings": 64}
_T5: dict[str, Any] = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8,
    "num_labels": 10,
}  # fmt: skip
_STAGES: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 10}
_WAVE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": [16, 16],
    "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
    "mask_time_prob": 0.0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip


def _hugging_face(family: str, model: str, config: str, batch: Callable[[], dict[str, Any]], **settings: Any) -> Architecture:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return Architecture(model, family, make, batch)


def _decoders() -> list[Architecture]:
    def one(name: str, config: str, **settings: Any) -> Architecture:
        return _hugging_face("decoder", name, config, _text, **settings)

    return [
        one("GPT2LMHeadModel", "GPT2Config", **_OLD),
        one("GPTNeoForCausalLM", "GPTNeoConfig", vocab_size=VOCAB, hidden_size=WIDTH, num_layers=2, num_heads=4, window_size=8,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=64, attention_dropout=0.1, resid_dropout=0.1),
        one("GPTJForCausalLM", "GPTJConfig", **_OLD, rotary_dim=4, resid_pdrop=0.1),
        one("GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER, hidden_dropout=0.1),
        one("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **_OLD),
        one("CodeGenForCausalLM", "CodeGenConfig", **_OLD, rotary_dim=4, resid_pdrop=0.1),
        one("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
        one("MistralForCausalLM", "MistralConfig", **_GROUPED, sliding_window=8),
        one("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
        one("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=8),
        one("GemmaForCausalLM", "GemmaConfig", **_GROUPED, head_dim=8),
        one("Gemma2ForCausalLM", "Gemma2Config", **_GROUPED, head_dim=8, sliding_window=8),
        one("Gemma3ForCausalLM", "Gemma3TextConfig", **_GROUPED, head_dim=8, sliding_window=8),
        one("PhiForCausalLM", "PhiConfig", **_DECODER, resid_pdrop=0.1),
        one("Phi3ForCausalLM", "Phi3Config", **_GROUPED, resid_pdrop=0.1),
        one("OPTForCausalLM", "OPTConfig", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
            max_position_embeddings=64, word_embed_proj_dim=WIDTH, pad_token_id=0),
        one("BloomForCausalLM", "BloomConfig", vocab_size=VOCAB, hidden_size=WIDTH, n_layer=2, n_head=4, hidden_dropout=0.1, attention_dropout=0.1),
        one("FalconForCausalLM", "FalconConfig", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            hidden_dropout=0.1, attention_dropout=0.1),
        one("Olmo2ForCausalLM", "Olmo2Config", **_GROUPED),
        one("StableLmForCausalLM", "StableLmConfig", **_GROUPED, hidden_dropout=0.1),
        one("Starcoder2ForCausalLM", "Starcoder2Config", **_GROUPED, residual_dropout=0.1),
        one("CohereForCausalLM", "CohereConfig", **_GROUPED),
        one("XGLMForCausalLM", "XGLMConfig", vocab_size=VOCAB, d_model=WIDTH, num_layers=2, attention_heads=4, ffn_dim=64,
            max_position_embeddings=64, layerdrop=0.0),
        one("MptForCausalLM", "MptConfig", vocab_size=VOCAB, d_model=WIDTH, n_layers=2, n_heads=4, max_seq_len=64),
        one("GraniteForCausalLM", "GraniteConfig", **_GROUPED),
        one("SmolLM3ForCausalLM", "SmolLM3Config", **_GROUPED),
    ]  # fmt: skip


def _encoders() -> list[Architecture]:
    def one(name: str, config: str, batch: Callable[[], dict[str, Any]] = _text, **settings: Any) -> Architecture:
        return _hugging_face("encoder", name, config, batch, **settings)

    disentangled = {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    return [
        one("BertForMaskedLM", "BertConfig", **_ENCODER),
        one("RobertaForMaskedLM", "RobertaConfig", **_ENCODER),
        one("DistilBertForMaskedLM", "DistilBertConfig", vocab_size=VOCAB, dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=64,
            max_position_embeddings=64),
        one("AlbertForMaskedLM", "AlbertConfig", **_ENCODER, embedding_size=16, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
        one("ElectraForMaskedLM", "ElectraConfig", **_ENCODER, embedding_size=16),
        one("DebertaForMaskedLM", "DebertaConfig", **disentangled),
        one("DebertaV2ForMaskedLM", "DebertaV2Config", **disentangled),
        one("MPNetForMaskedLM", "MPNetConfig", **_ENCODER),
        one("ModernBertForMaskedLM", "ModernBertConfig", **_ENCODER, attention_dropout=0.1, mlp_dropout=0.1),
        one("XLNetLMHeadModel", "XLNetConfig", vocab_size=VOCAB, d_model=WIDTH, n_layer=2, n_head=4, d_inner=64),
        one("LongformerForMaskedLM", "LongformerConfig", **_ENCODER, attention_window=8),
        one("BigBirdForMaskedLM", "BigBirdConfig", **_ENCODER, attention_type="original_full"),
        one("FunnelForMaskedLM", "FunnelConfig", vocab_size=VOCAB, d_model=WIDTH, n_head=4, d_head=8, d_inner=64, block_sizes=[1, 1],
            num_decoder_layers=1),
        one("FNetForMaskedLM", "FNetConfig", _text_alone, vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, intermediate_size=64,
            max_position_embeddings=64),
        one("ReformerModelWithLMHead", "ReformerConfig", _text_alone, vocab_size=VOCAB, hidden_size=WIDTH, num_attention_heads=4,
            attention_head_size=8, feed_forward_size=64, attn_layers=["local", "local"], axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16],
            max_position_embeddings=64, is_decoder=True, local_attn_chunk_length=8),
    ]  # fmt: skip


def _encoder_decoders() -> list[Architecture]:
    def one(name: str, config: str, **settings: Any) -> Architecture:
        return _hugging_face("encoder-decoder", name, config, _text, **settings)

    return [
        one("T5ForConditionalGeneration", "T5Config", **_T5),
        one("MT5ForConditionalGeneration", "MT5Config", **_T5),
        one("BartForConditionalGeneration", "BartConfig", **_BOTH_64),
        one("MBartForConditionalGeneration", "MBartConfig", **_BOTH_64),
        one("PegasusForConditionalGeneration", "PegasusConfig", **_BOTH_64),
        one("MarianMTModel", "MarianConfig", **_BOTH_64),
        one("BlenderbotForConditionalGeneration", "BlenderbotConfig", **_BOTH_64),
        one("M2M100ForConditionalGeneration", "M2M100Config", **_BOTH_64, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
        one("LEDForConditionalGeneration", "LEDConfig", **_BOTH, attention_window=8, max_encoder_position_embeddings=64,
            max_decoder_position_embeddings=64),
        one("ProphetNetForConditionalGeneration", "ProphetNetConfig", vocab_size=VOCAB, hidden_size=WIDTH, encoder_ffn_dim=64, decoder_ffn_dim=64,
            num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    ]  # fmt: skip


def _vision() -> list[Architecture]:
    def one(name: str, config: str, **settings: Any) -> Architecture:
        return _hugging_face("vision", name, config, _pixels(), **settings)

    return [
        one("ViTForImageClassification", "ViTConfig", **_VISION, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
        one("DeiTForImageClassification", "DeiTConfig", **_VISION, hidden_dropout_prob=0.1),
        one("BeitForImageClassification", "BeitConfig", **_VISION, drop_path_rate=0.1),
        one("Dinov2ForImageClassification", "Dinov2Config", **{k: v for k, v in _VISION.items() if k != "intermediate_size"}, drop_path_rate=0.1),
        one("SwinForImageClassification", "SwinConfig", embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, image_size=32, patch_size=4,
            num_labels=10, drop_path_rate=0.1),
        one("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=10,
            drop_path_rate=0.1, image_size=32),
        one("ResNetForImageClassification", "ResNetConfig", **_STAGES, layer_type="bottleneck"),
        one("RegNetForImageClassification", "RegNetConfig", **_STAGES, groups_width=8),
        one("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.35, image_size=32, num_labels=10),
        one("EfficientNetForImageClassification", "EfficientNetConfig", image_size=32, num_labels=10, num_block_repeats=[1] * 7, hidden_dim=2560),
        one("SegformerForImageClassification", "SegformerConfig", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
            patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], num_labels=10, decoder_hidden_size=16),
        one("PoolFormerForImageClassification", "PoolFormerConfig", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_labels=10),
        _hugging_face("vision", "CLIPModel", "CLIPConfig", _text_and_pixels, projection_dim=16,
            text_config={**_ENCODER, "max_position_embeddings": 32, "eos_token_id": 2, "attention_dropout": 0.1},
            vision_config={**_VISION, "attention_dropout": 0.1}),
    ]  # fmt: skip


def _audio() -> list[Architecture]:
    def one(name: str, config: str, batch: Callable[[], dict[str, Any]], **settings: Any) -> Architecture:
        return _hugging_face("audio", name, config, batch, **settings)

    ears = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    return [
        one("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _sound(None), **_WAVE),
        one("Wav2Vec2ForCTC", "Wav2Vec2Config", _sound(6), **_WAVE, ctc_loss_reduction="mean"),
        one("HubertForSequenceClassification", "HubertConfig", _sound(None), **_WAVE),
        one("UniSpeechForSequenceClassification", "UniSpeechConfig", _sound(None), **_WAVE),
        one("WhisperForConditionalGeneration", "WhisperConfig", _spectrum((8, 32), "input_features", True), **_BOTH, **ears),
        one("WhisperForAudioClassification", "WhisperConfig", _spectrum((8, 32), "input_features", False), **_BOTH, **ears),
        one("ASTForAudioClassification", "ASTConfig", _spectrum((64, 16), "input_values", False), hidden_size=WIDTH, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=64, patch_size=8, frequency_stride=8, time_stride=8, max_length=64, num_mel_bins=16,
            num_labels=2, hidden_dropout_prob=0.1),
    ]  # fmt: skip


def _state_space() -> list[Architecture]:
    def one(name: str, config: str, batch: Callable[[], dict[str, Any]] = _text_alone, **settings: Any) -> Architecture:
        return _hugging_face("state space", name, config, batch, vocab_size=VOCAB, hidden_size=WIDTH, **settings)

    return [
        one("MambaForCausalLM", "MambaConfig", num_hidden_layers=2, state_size=4),
        one("Mamba2ForCausalLM", "Mamba2Config", num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
        one("FalconMambaForCausalLM", "FalconMambaConfig", num_hidden_layers=2, state_size=4),
        one("RwkvForCausalLM", "RwkvConfig", attention_hidden_size=WIDTH, num_hidden_layers=2, context_length=64),
        one("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", _text, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
            lru_width=WIDTH, attention_window_size=8, num_key_value_heads=1),
    ]  # fmt: skip


def _mixtures() -> list[Architecture]:
    def one(name: str, config: str, **settings: Any) -> Architecture:
        return _hugging_face("mixture of experts", name, config, _text, **settings)

    return [
        one("MixtralForCausalLM", "MixtralConfig", **_EXPERTS, num_local_experts=4),
        one("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_EXPERTS, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32),
        one("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=8),
        one("OlmoeForCausalLM", "OlmoeConfig", **_EXPERTS, num_experts=4),
        one("GraniteMoeForCausalLM", "GraniteMoeConfig", **_EXPERTS, num_local_experts=4),
        one("PhimoeForCausalLM", "PhimoeConfig", **_EXPERTS, num_local_experts=4),
        one("GptOssForCausalLM", "GptOssConfig", **_EXPERTS, num_local_experts=4, head_dim=8, sliding_window=8),
        one("DeepseekV3ForCausalLM", "DeepseekV3Config", **_DECODER, **_LATENT, n_routed_experts=4, num_experts_per_tok=2),
        one("JambaForCausalLM", "JambaConfig", **_GROUPED, num_experts=4, attn_layer_offset=0, attn_layer_period=2, expert_layer_period=2,
            expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4),
        one("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", **_T5, num_decoder_layers=2, num_experts=4,
            expert_capacity=8, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    ]  # fmt: skip


# -- plain modules ------------------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of experts with static capacity: each expert takes the `capacity` tokens that want it most (Zhou et al. 2022, arXiv:2202.09368)."""

    def __init__(self, experts: int = 4, capacity: int = 8) -> None:
        super().__init__()
        self.tokens, self.capacity = nn.Embedding(VOCAB, WIDTH), capacity
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(experts, *shape) * 0.1) for shape in ((WIDTH, 64), (64, WIDTH)))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        wants = self.router(x).softmax(-1)
        weight, chosen = wants.t().topk(self.capacity)
        hidden = torch.bmm(F.gelu(torch.bmm(x[chosen], self.up)), self.down) * weight[..., None]
        x = x + self.drop(torch.zeros_like(x).index_add(0, chosen.flatten(), hidden.flatten(0, 1)))
        return F.cross_entropy(self.head(x), labels.flatten())


class UNet(nn.Module):
    """Down, up, and a skip between (Ronneberger et al. 2015), with group norm; each pixel gets one of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = self._pair(3, 8), self._pair(8, 16), self._pair(16, 8)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(8, 2, 1)

    @staticmethod
    def _pair(channels: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(), nn.Dropout2d(0.1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        first = self.first(images)
        inner = self.inner(F.max_pool2d(first, 2))
        out = self.head(self.last(torch.cat([first, self.up(inner)], 1)))
        return F.cross_entropy(out, labels[:, None, None].expand(-1, *images.shape[2:]) % 2)


class DenseNet(nn.Module):
    """Each layer reads all before it (Huang et al. 2017, arXiv:1608.06993)."""

    def __init__(self, layers: int = 4, growth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(growth * n), nn.ReLU(inplace=True), nn.Conv2d(growth * n, growth, 3, padding=1))
            for n in range(1, layers + 1)
        )
        self.head = nn.Linear(growth * (layers + 1), 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Translator(nn.Module):
    """torch's own encoder-decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.both = nn.Transformer(WIDTH, 4, 1, 1, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return F.cross_entropy(self.head(self.both(self.tokens(ids), self.tokens(labels), tgt_mask=causal)).flatten(0, 1), labels.flatten())


def _plain() -> list[Architecture]:
    from packhorse.models.bert import BERT
    from packhorse.models.gpt import GPT
    from packhorse.models.lstm import LSTM
    from packhorse.models.resnet import equal_stages, resnet

    size: dict[str, Any] = {"vocab": VOCAB, "layers": 2, "width": WIDTH, "heads": 4, "seq_len": 16, "dropout": 0.1}

    def recurrent(cell: Any, unrolled: bool) -> Callable[[], nn.Module]:
        return lambda: LSTM(vocab=VOCAB, layers=2, width=WIDTH, cell=cell, unrolled=unrolled, dropout=0.1)

    return [
        Architecture("packhorse GPT", "plain", lambda: GPT(**size), _pairs),
        Architecture("packhorse BERT, post-LN", "plain", lambda: BERT(**size), _pairs),
        Architecture("packhorse BERT, pre-LN", "plain", lambda: BERT(**size, pre_norm=True), _pairs),
        Architecture("packhorse ResNet-20", "plain", lambda: resnet(20, classes=10), _images),
        Architecture("packhorse ResNet-50", "plain", lambda: resnet(50, images="imagenet", classes=10, width=8), _images),
        Architecture("packhorse conv-bn-relu net", "plain", lambda: equal_stages(16, classes=10, width=8), _images),
        Architecture("packhorse LSTM, unrolled", "recurrent", recurrent("lstm", True), _pairs),
        Architecture("mixture of experts, static capacity", "mixture of experts", Experts, _pairs),
        Architecture("U-Net", "plain", UNet, _images),
        Architecture("DenseNet", "plain", DenseNet, _images),
        Architecture("nn.Transformer", "plain", Translator, _pairs),
    ]


def architectures() -> list[Architecture]:
    """The whole zoo, in the order of the table."""
    return [
        *_plain(), *_decoders(), *_encoders(), *_encoder_decoders(), *_vision(), *_audio(), *_state_space(), *_mixtures(),
    ]  # fmt: skip
