"""Links between ranks: messages of each pair, who came late, and how fast they are; collectives by who came last."""
