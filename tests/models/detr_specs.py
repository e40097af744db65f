"""Small networks of transformers' detectors, as entries of ``model.options.config``."""

from typing import Any

RESNET: dict[str, Any] = {
    "model_type": "rt_detr_resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
HGNET: dict[str, Any] = {
    "model_type": "hgnet_v2",
    "embedding_size": 8,
    "hidden_sizes": [16, 16, 16, 32],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 16, 32],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "stage_light_block": [False] * 4,
    "out_features": ["stage2", "stage3", "stage4"],
}
SHARED: dict[str, Any] = {
    "freeze_backbone_batch_norms": False,
    "encoder_hidden_dim": 16,
    "d_model": 16,
    "encoder_in_channels": [16, 16, 32],
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 20,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "decoder_in_channels": [16, 16, 16],
    "num_denoising": 10,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "rt_detr": {**SHARED, "backbone_config": RESNET},
    "rt_detr_v2": {**SHARED, "backbone_config": RESNET},
    "d_fine": {**SHARED, "backbone_config": HGNET},
}
