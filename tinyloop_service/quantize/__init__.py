"""From an fp16 model to an INT4 one: rounding to nearest, GPTQ that knows a block is used at every loop, and the
conversion of GPTQ tensors made elsewhere.

    arrays        NumPy or CuPy                          gptq         one linear: weights, Hessian → INT4
    calibration   a file → windows of tokens             procedure    unit by unit, pass by pass
    hessians      inputs of linears → Hessians           record       what the file says of it
    foreign       qweight, qzeros, scales, g_idx → INT4

Knows model files and tokenizers; refuses to know engines, servers and terminals.
"""
