"""Element types by their short names, without torch. `rng` is the type of a random state: it takes no arena bytes while it is only threaded."""

ITEMSIZE = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "f8e5m2": 1, "c64": 8, "c128": 16,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "bool": 1, "rng": 0,
}  # fmt: skip
