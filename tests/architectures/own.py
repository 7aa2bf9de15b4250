"""Small models of our own: shapes of code that Hugging Face's models do not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LstmClassifier(nn.Module):
    """Embedding, two stacked LSTMs, a classifier on the last state."""

    def __init__(self, vocabulary: int = 48, dim: int = 24, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.classifier(states[:, -1])


class AttentionReader(nn.Module):
    """nn.MultiheadAttention on its own: its forward reads `out_proj.weight` without calling `out_proj`."""

    def __init__(self, dim: int = 24, heads: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, dim))
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, classes)

    def forward(self, features: Tensor) -> Tensor:
        pooled, _ = self.attention(self.query.expand(features.shape[0], -1, -1), features, features)
        return self.classifier(self.norm(pooled[:, 0]))


class Encoder(nn.Module):
    """nn.TransformerEncoder between an embedding and a head."""

    def __init__(self, vocabulary: int = 48, dim: int = 24, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class ConvBlock(nn.Module):
    """Two convolutions with BatchNorm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)

    def forward(self, image: Tensor) -> Tensor:
        image = torch.relu(self.first_norm(self.first(image)))
        return torch.relu(self.second_norm(self.second(image)))


class UNet(nn.Module):
    """Down and up with skip connections; nested families and a lone middle."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([ConvBlock(width, width), ConvBlock(width, 2 * width)])
        self.middle = ConvBlock(2 * width, 2 * width)
        self.up = nn.ModuleList([ConvBlock(4 * width, width), ConvBlock(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        image = self.stem(image)
        skips = []
        for block in self.down:
            image = block(image)
            skips.append(image)
            image = nn.functional.max_pool2d(image, 2)
        image = self.middle(image)
        for block in self.up:
            image = nn.functional.interpolate(image, scale_factor=2.0)
            image = block(torch.cat([image, skips.pop()], dim=1))
        return self.head(image)


class TiedByHand(nn.Module):
    """The output is `F.linear` with the embedding's weight: no slot of a head shows the tie."""

    def __init__(self, vocabulary: int = 64, dim: int = 24, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.linear(hidden, self.embedding.weight)
