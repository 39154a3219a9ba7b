"""Random straight-line programs over tensors: views, writes through them, reductions, library calls, numbers of every type and layout.

A program is built by running it: a statement that eager refuses is left out, so that every program is valid. Templates are separated by white space.
`{x}` and `{y}` are tensors, `{d}` and `{f}` dimensions of x, `{n}` the length of x along d, `{k}` an index below it, `{v}` the new name, `{c}` the channels of x.
"""

from __future__ import annotations

import ast
import random
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

FLOATS = ("float32",) * 6 + ("float64", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8", "bool", "int16")
LARGEST = 20_000  # elements of a value
LARGE = {
    1: [(1000,), (4099,), (65537,)],
    2: [(37, 129), (128, 257), (513, 64), (3, 5000), (4096, 7)],
    3: [(2, 65, 33), (16, 17, 18), (64, 3, 65), (8, 128, 40)],
    4: [(2, 16, 9, 33), (1, 3, 32, 64), (3, 33, 5, 5), (2, 8, 31, 17)],
}
"""Shapes whose loops are cut into parts, vectors with a rest, and several threads' portions."""

UNARY = """
{x}.abs() -{x} {x}.exp() {x}.sin() {x}.cos() {x}.tanh() {x}.sigmoid() F.relu({x}) F.gelu({x}) F.silu({x}) F.softplus({x}) {x}.sqrt() {x}.square() {x}.sign()
{x}.floor() {x}.ceil() {x}.round() {x}.trunc() {x}.frac() {x}.log1p() {x}.expm1() {x}.erf() {x}.rsqrt() {x}.reciprocal() F.leaky_relu({x},0.1) F.elu({x})
F.hardswish({x}) F.mish({x}) {x}.atan() {x}.clamp(-0.5,0.7) {x}.clamp_min(0.1) F.hardtanh({x}) {x}.isnan() {x}.isfinite() {x}.logical_not() {x}+1 {x}*0.5 2-{x}
{x}/3 {x}//2 {x}%3 {x}**2 {x}**3 2**{x} {x}>0 {x}==1 {x}!=0 {x}.to(torch.float32) {x}.to(torch.bfloat16) {x}.to(torch.int32) {x}.to(torch.float64) {x}.half()
{x}.bool() {x}.long() {x}.clone() {x}.contiguous() {x}.detach() torch.nan_to_num({x}) F.softsign({x}) F.logsigmoid({x}) {x}.lgamma() {x}.deg2rad() {x}.sinh()
{x}.cosh() {x}.asinh() torch.signbit({x}) {x}.log().nan_to_num() torch.heaviside({x},{x}.new_ones(())) F.threshold({x},0.1,0.2) F.celu({x}) F.selu({x})
F.hardsigmoid({x}) F.tanhshrink({x}) F.softshrink({x}) F.glu({x},-1) F.relu6({x}) torch.special.erfc({x}) torch.special.ndtr({x}) torch.exp2({x})
torch.log2({x}.abs()+1) {x}.fmod(1.5) {x}.remainder(1.5) torch.ldexp({x},torch.tensor(2)) ~{x} {x}<<1
"""
BINARY = """
{x}+{y} {x}-{y} {x}*{y} {x}/({y}.abs()+1) torch.maximum({x},{y}) torch.minimum({x},{y}) torch.where({x}>{y},{x},{y}) torch.where({x}>0,{y},0.5) {x}>{y}
{x}=={y} {x}<={y} torch.atan2({x},{y}) torch.hypot({x},{y}) {x}.lerp({y},0.3) torch.addcmul({x},{x},{y},value=0.5) torch.addcdiv({x},{x},{y}.abs()+1)
{x}%({y}.abs()+1) {x}//({y}.abs()+1) torch.fmod({x},{y}.abs()+1) torch.add({x},{y},alpha=2) torch.rsub({x},{y}) torch.logaddexp({x},{y}) {x}&{y} {x}|{y} {x}^{y}
torch.logical_and({x},{y}) torch.copysign({x},{y}) torch.fmax({x},{y}) torch.fmin({x},{y}) torch.pow({x}.abs()+0.5,{y}) torch.true_divide({x},{y}+10)
torch.div({x},{y}.abs()+1,rounding_mode='trunc') torch.div({x},{y}.abs()+1,rounding_mode='floor') F.mse_loss({x},{y}) F.smooth_l1_loss({x},{y})
F.huber_loss({x},{y},reduction='none') F.kl_div({x},{y}.abs()) F.binary_cross_entropy_with_logits({x},{y}.sigmoid()) F.cosine_similarity({x},{y},dim=-1)
torch.dist({x},{y}) F.l1_loss({x},{y},reduction='sum') torch.xlogy({x},{y}.abs()+1) torch.nextafter({x},{y}) torch.float_power({x}.abs()+1,{y})
torch.special.xlog1py({x},{y}.abs()) torch.isclose({x},{y}) {x}.eq({y})
"""
VIEW = """
{x}.transpose({d},{f}) {x}.permute({order}) {x}.unsqueeze({d}) {x}.reshape(-1) {x}.flatten({d}) {x}[{k}:] {x}[...,::2] {x}[...,1:] {x}.select({d},{k})
{x}.narrow({d},{k},1) {x}.squeeze() {x}.squeeze({d}) {x}.unbind({d})[{k}] {x}.chunk(2,{d})[-1] {x}.split({n}//2+1,{d})[0] {x}.expand(3,*{x}.shape)
{x}.diagonal(0,{d},{f}) {x}.unfold({d},1,1) {x}.movedim({d},{f}) {x}.mT {x}[None] {x}[...,None] {x}.view({x}.shape) {x}.reshape({x}.shape[::-1]) {x}.view_as({x})
{x}.broadcast_to((2,*{x}.shape)) {x}.unflatten({d},(-1,1)) {x}.flip({d}) {x}.roll(1,{d}) {x}.tile(2) torch.rot90({x},1,({d},{f})) {x}.swapaxes({d},{f}).contiguous()
{x}.repeat_interleave(2,{d}) {x}.tril() {x}.triu(1) torch.diag_embed({x}) {x}.T {x}.adjoint() {x}.real torch.atleast_2d({x})
{x}.clone(memory_format=torch.contiguous_format) {x}.as_strided((2,),(1,)) {x}.clone().as_strided((2,2),(1,1),1)
"""
REDUCE = """
{x}.sum() {x}.mean() {x}.sum({d}) {x}.sum({d},keepdim=True) {x}.mean({d}) {x}.mean({d},keepdim=True) {x}.amax({d}) {x}.amin({d},keepdim=True) {x}.max({d}).values
{x}.min({d})[0] {x}.argmax({d}) {x}.argmin() {x}.var({d}) {x}.std({d},correction=0) {x}.norm() {x}.norm(dim={d}) {x}.prod({d}) {x}.any({d}) {x}.all()
{x}.logsumexp({d}) {x}.softmax({d}) {x}.log_softmax({d}) {x}.cumsum({d}) {x}.cumprod({d}) {x}.cummax({d})[0] {x}.sort({d})[0] {x}.topk(1,{d})[0] {x}.median({d})[0]
{x}.count_nonzero({d}) {x}.argsort({d},stable=True) {x}.diff(dim={d}) {x}.sum(dtype=torch.float64) {x}.nansum({d}) {x}.nanmean({d}) F.normalize({x},dim={d})
torch.linalg.vector_norm({x},1,{d}) {x}.logcumsumexp({d}) torch.var_mean({x},{d})[1] torch.aminmax({x})[0] {x}.kthvalue(1,{d})[0] {x}.mode({d})[0]
torch.std_mean({x},{d},unbiased=False)[0] {x}.sum(({d},)) {x}.float().mean((0,-1)) {x}.max() {x}.cumsum({d}).flip({d}) F.softmin({x},{d}) torch.trapezoid({x},dim={d})
{x}.quantile(0.5,{d}) torch.histc({x}.detach().float(),4,-2,2) torch.bucketize({x}.detach(),torch.tensor([-1.,0.,1.])) torch.renorm({x},2,{d},1.0)
"""
MATRIX = """
{x}@{y} {x}@{x}.mT {x}.mT@{x} torch.matmul({y},{x}) torch.einsum('...i,...j->...ij',{x},{x}) torch.einsum('ij,kj->ik',{x},{x})
torch.outer({x}.reshape(-1)[:8],{y}.reshape(-1)[:8]) F.linear({x},torch.ones(3,{x}.shape[-1],dtype={x}.dtype)*0.1,torch.arange(3).to({x}.dtype)) torch.bmm({x},{x}.mT)
torch.cdist({x},{x}) F.scaled_dot_product_attention({x},{x},{x}) F.scaled_dot_product_attention({x},{x},{x},is_causal=True)
torch.addmm({x}@{x}.mT,{x},{x}.mT,beta=0.5,alpha=2) {x}.mT.contiguous()@{y} torch.baddbmm({x}@{x}.mT,{x},{x}.mT) torch.mv({x},{x}[0])
torch.dot({x}.reshape(-1),{x}.reshape(-1)) torch.linalg.multi_dot([{x},{x}.mT,{x}]) torch.inner({x},{x}) torch.tensordot({x},{x},{rank})
"""
NETWORK = """
F.layer_norm({x},{x}.shape[-1:]) F.layer_norm({x},{x}.shape[-1:],torch.ones({x}.shape[-1])*2,torch.ones({x}.shape[-1])) F.group_norm({x},1)
F.batch_norm({x},None,None,training=True) F.instance_norm({x}) F.rms_norm({x},{x}.shape[-1:]) F.avg_pool1d({x},2,1,padding=1) F.max_pool2d({x},2,1)
F.avg_pool2d({x},2,1,1,count_include_pad=False) F.adaptive_avg_pool2d({x},2) F.adaptive_max_pool1d({x},2) F.pad({x},(1,2)) F.pad({x},(1,1),mode='reflect')
F.pad({x},(1,1),mode='replicate') F.pad({x},(-1,1),value=0.5) F.interpolate({x},scale_factor=2) F.interpolate({x},size=(5,6),mode='bilinear')
F.interpolate({x},scale_factor=2,mode='bicubic',align_corners=True) F.conv1d({x},torch.ones(2,{c},2,dtype={x}.dtype)*0.3,padding=1)
F.conv2d({x},torch.ones(2,{c},1,2,dtype={x}.dtype)*0.3) F.conv_transpose2d({x},torch.ones({c},2,2,2,dtype={x}.dtype)*0.3) F.unfold({x},2)
F.pixel_shuffle({x}.repeat(1,4,1,1),2) F.dropout({x},0.5) F.dropout({x},0.3,training=False) F.local_response_norm({x},2) F.max_pool1d({x},2) F.lp_pool1d({x},2,2)
F.conv2d({x},torch.ones({c},1,2,2,dtype={x}.dtype)*0.3,groups={c},padding='same') F.grid_sample({x},torch.zeros({x}.shape[0],2,2,2,dtype={x}.dtype)+0.3)
F.prelu({x},torch.tensor([0.2],dtype={x}.dtype)) torch.rand_like({x}) torch.randn({x}.shape)+{x} torch.bernoulli(torch.sigmoid({x})) F.gumbel_softmax({x},dim=-1)
F.alpha_dropout({x},0.5,True) F.dropout2d({x},0.5)
"""
INDEX = """
{x}.gather({d},torch.zeros_like({x},dtype=torch.int64)) {x}.index_select({d},torch.tensor([0,{k},0])) {x}[torch.tensor([0,-1])] {x}[...,torch.tensor([[0,0],[-1,0]])]
torch.take_along_dim({x},{x}.argsort({d}),{d}) {x}.take(torch.tensor([0,-1])) F.embedding(torch.tensor([0,1,0]),{x}) F.one_hot({x}.long().abs()%4,4) {x}[:,torch.arange(1)]
{x}.masked_fill({x}>0,-1) torch.scatter({x},{d},torch.zeros_like({x},dtype=torch.int64),{x}) {x}.index_add({d},torch.tensor([0]),{x}.narrow({d},0,1))
F.cross_entropy({x},torch.zeros({x}.shape[0],dtype=torch.int64)) F.nll_loss({x}.log_softmax(1),torch.zeros({x}.shape[0],dtype=torch.int64))
torch.scatter_reduce({x},{d},torch.zeros_like({x},dtype=torch.int64),{x},'amax') {x}.scatter_reduce({d},torch.zeros_like({x},dtype=torch.int64),{x},'mean') {x}[0]
F.embedding_bag(torch.tensor([[0,0]]),{x}) torch.index_reduce({x},{d},torch.tensor([0]),{x}.narrow({d},0,1),'prod')
torch.searchsorted(torch.tensor([-1.,0.,1.]).to({x}.dtype),{x}.contiguous()) torch.isin({x},torch.tensor([0,1]).to({x}.dtype))
"""
JOIN = """
torch.cat([{x},{x}],{d}) torch.stack([{x},{x}],{d}) torch.cat([{x},{y}],{d}) torch.hstack([{x},{y}]) torch.vstack([{x},{x}]) torch.stack([{x},{x}*2],-1).flatten(-2)
torch.cat([{x}.narrow({d},0,1),{x},{x}.flip({d})],{d}) torch.block_diag({x},{x}) torch.meshgrid({x},{x},indexing='ij')[1] torch.column_stack([{x},{x}])
torch.cat([{x}.new_zeros({x}.shape),{x}],{d})
"""
LAYERS = """
F.conv2d({x},torch.ones(3,{c},3,3,dtype={x}.dtype)*0.2,torch.ones(3,dtype={x}.dtype),stride=2,padding=1,dilation=1).relu()
F.conv3d({x}[:,None],torch.ones(2,1,1,2,2,dtype={x}.dtype)*0.3) F.conv_transpose1d({x},torch.ones({c},2,3,dtype={x}.dtype)*0.3,stride=2,output_padding=1)
F.silu(F.batch_norm(F.conv2d({x},torch.ones(8,{c},1,1,dtype={x}.dtype)*0.3),torch.zeros(8),torch.ones(8))) {x}.contiguous(memory_format=torch.channels_last)
F.batch_norm({x},torch.zeros({c}),torch.ones({c}),torch.full(({c},),1.5),torch.full(({c},),0.5),True,0.2) F.group_norm({x},{c},torch.ones({c})*2,torch.ones({c}))
F.instance_norm({x},weight=torch.ones({c})*0.5) F.layer_norm({x},{x}.shape[1:]) F.max_pool2d({x},3,2,1,ceil_mode=True) F.max_pool3d({x}[:,None],(1,2,2),1)
F.avg_pool2d({x},3,2,1,ceil_mode=True,divisor_override=5) F.adaptive_avg_pool1d({x},3) F.adaptive_max_pool2d({x},(2,1)) F.max_pool2d({x},2,1,return_indices=True)[1]
F.max_unpool2d(*F.max_pool2d({x},2,2,return_indices=True),2,output_size={x}.shape[-2:]) F.fold(F.unfold({x},2),{x}.shape[-2:],2) F.pixel_unshuffle({x}.repeat(1,1,2,2),2)
F.channel_shuffle({x},{c}) F.interpolate({x},size=(3,7),mode='nearest-exact') F.interpolate({x},scale_factor=0.5,mode='area') F.interpolate({x},size=(4,),mode='linear')
F.interpolate({x},size=(7,3),mode='bilinear',antialias=True) F.affine_grid({x}.reshape(-1)[:6].reshape(1,2,3),(1,1,3,4),align_corners=False)
F.pad({x},(2,1,1,0),mode='circular') F.pad({x},(1,0,0,2),mode='reflect') F.pad({x},(0,0,1,1),value=-1) F.embedding(torch.tensor([[0,1],[1,0]]),{x},padding_idx=0)
F.embedding_bag(torch.tensor([0,1,1]),{x},torch.tensor([0,2]),mode='max') F.bilinear({x},{x},torch.ones(2,{x}.shape[-1],{x}.shape[-1],dtype={x}.dtype)*0.1)
F.scaled_dot_product_attention({x},{x},{x},attn_mask={x}@{x}.mT) F.scaled_dot_product_attention({x}[None],{x}[None],{x}[None],attn_mask=({x}@{x}.mT>0)[None],scale=0.3)
F.lp_pool2d({x},3,2) F.fractional_max_pool2d({x},2,output_size=2) F.feature_alpha_dropout({x},0.4,True) F.rrelu({x},0.1,0.3,True) F.local_response_norm({x},3,0.5)
F.cosine_embedding_loss({x}[0],{x}[-1],torch.tensor(1)) F.triplet_margin_loss({x},{x}+1,{x}.flip(0)) F.hinge_embedding_loss({x},{x}.sign()) F.gaussian_nll_loss({x},{y},{x}.abs()+1)
F.poisson_nll_loss({x},{y},full=False) F.soft_margin_loss({x},{x}.sign()) F.margin_ranking_loss({x},{y},torch.tensor([1.])) F.multi_margin_loss({x},torch.zeros({x}.shape[0],dtype=torch.int64))
F.cross_entropy({x},torch.zeros({x}.shape[0],dtype=torch.int64),label_smoothing=0.2,reduction='sum') F.cross_entropy({x},{x}.softmax(1).detach()) F.multilabel_soft_margin_loss({x},{x}.sigmoid())
F.cross_entropy({x},torch.tensor([-100]+[0]*({x}.shape[0]-1)),torch.arange({c}).to({x}.dtype)+1) F.nll_loss({x},torch.zeros([{x}.shape[0],*{x}.shape[2:]],dtype=torch.int64),ignore_index=1)
F.binary_cross_entropy({x}.sigmoid(),{y}.sigmoid().detach()) F.pairwise_distance({x},{y}) F.pdist({x}) F.pairwise_distance({x},{x}.flip(0),keepdim=True)
F.batch_norm({x}.transpose(1,-1),None,None,training=True).transpose(1,-1) F.linear(F.relu({x}),torch.ones(70,{x}.shape[-1],dtype={x}.dtype)*0.1) F.silu({x}@{x}.mT)
"""
SPECIAL = """
torch.linalg.det({x}@{x}.mT+torch.eye({x}.shape[-2],dtype={x}.dtype)) torch.linalg.solve({x}@{x}.mT+2*torch.eye({x}.shape[-2],dtype={x}.dtype),{x}) torch.linalg.svdvals({x})
torch.linalg.cholesky({x}@{x}.mT+2*torch.eye({x}.shape[-2],dtype={x}.dtype)) torch.linalg.qr({x})[1].abs() torch.linalg.matrix_norm({x}) torch.linalg.vector_norm({x},float('inf'),{d})
torch.linalg.matrix_power({x}@{x}.mT,2) torch.linalg.cross({x}[...,:3],{x}[...,:3]+1) torch.trace({x}) torch.linalg.slogdet({x}@{x}.mT+torch.eye({x}.shape[-2],dtype={x}.dtype))[1]
torch.linalg.eigvalsh({x}@{x}.mT) torch.linalg.pinv({x}) torch.kron({x},{x}) torch.vander({x}) torch.cov({x}) torch.corrcoef({x}) torch.fft.rfft({x}).abs() torch.fft.irfft(torch.fft.rfft({x}),n={x}.shape[-1])
torch.fft.fft2({x}).imag torch.fft.fftshift({x}) torch.complex({x},{x}).conj().imag torch.view_as_complex(torch.stack([{x},{x}*2],-1)).abs() ({x}*1j).imag ({x}+1j*{y}).abs()
torch.special.i0e({x}) torch.special.sinc({x}) torch.special.logit({x}.sigmoid()) torch.digamma({x}.abs()+1) torch.erfinv({x}.clamp(-0.9,0.9)) torch.special.entr({x}.abs()+0.1)
torch.mvlgamma({x}.abs()+3,2) torch.special.log_ndtr({x}) torch.special.bessel_j0({x}.detach()) torch.sinc({x}) torch.special.expit({x}) torch.special.softmax({x},{d})
torch.tensor_split({x},2,{d})[0] torch.cartesian_prod({x}.reshape(-1)[:3],{x}.reshape(-1)[:2]) torch.combinations({x}.reshape(-1)[:4]) torch.bincount({x}.long().abs().reshape(-1))
{x}.movedim(0,-1).contiguous() {x}.unsafe_chunk(2,{d})[0] {x}.hsplit(1)[0] torch.dstack([{x},{x}]) {x}.swapdims({d},{f}) {x}.unfold({d},2,1) {x}.square().cumsum({d}).sqrt() torch.slice_scatter({x},{x}.narrow({d},0,1),{d},0,1)
torch.select_scatter({x},{x}.select({d},0)*2,{d},{k}) torch.diagonal_scatter({x},{x}.diagonal()*2) torch.masked_fill({x},{x}.abs()>1,float('-inf')).softmax(-1) torch.triu_indices(3,{n})[1]
torch.scatter_reduce({x},{d},{x}.argsort({d}),{x},'prod') torch.scatter_reduce({x},{d},torch.zeros_like({x},dtype=torch.int64),{x},'sum',include_self=False)
torch.segment_reduce({x},'sum',lengths=torch.tensor([{x}.shape[0]])) torch.unravel_index(torch.tensor([1,0]),(2,3))[0]+{x}.sum() torch.bucketize({x}.detach(),torch.tensor([-1.,0.,1.]),right=True)
torch.nn.utils.parameters_to_vector([{x},{x}*2]) torch._foreach_add([{x},{x}],[1.0,2.0])[1] torch._foreach_mul([{x},{y}],2)[0] torch._foreach_norm([{x}])[0] torch.clamp({x},{x}.mean(),{x}.max())
{x}.argmax({d},keepdim=True) {x}.max({d},keepdim=True).indices {x}.var(({d},),correction=2) {x}.std() {x}.norm(p=1,dim={d}) {x}.norm(p=float('inf')) {x}.nanmedian() {x}.cumsum({d},dtype=torch.float64)
{x}.addmv({x}.new_ones({x}.shape[1]),{x}[0]) torch.einsum('b...->...',{x}) torch.einsum('...ij,...kj->...ik',{x},{x}) torch.einsum('i...,i...->...',{x},{x}) torch.chain_matmul({x},{x}.mT)
torch.func.grad(lambda*q:(q[0].sin()*q[0]).sum())({x}) torch.func.vmap(lambda*q:q[0].softmax(-1)*2)({x}) torch.func.jvp(torch.sin,({x},),({x},))[1] torch.vmap(torch.dot)({x},{x})
torch.stft({x}.reshape(-1),4,return_complex=True,window=torch.ones(4)).abs() torch.nn.functional.cosine_similarity({x},{x}.flip(0),{d}) torch.logcumsumexp({x},{d}) torch.gradient({x}.reshape(-1))[0]
torch.frexp({x})[0] torch.bitwise_not({x}) {x}.bitwise_left_shift(1) {x}>>1 torch.gcd({x},{y}) torch.floor_divide({x},2) {x}.div(0.3,rounding_mode='floor') {x}.to(torch.uint8) {x}.short() {x}.char()
"""
MAKE = """
torch.arange({n})+{x} torch.zeros_like({x}) torch.full({x}.shape,0.5) torch.linspace(0,1,{n})*{x} {x}.new_ones(3) torch.eye({n})@{x} torch.tensor([1.5,2.0])
{x}*{x}.shape[0] {x}.numel()+{x} {x}.type_as(a0) {x}.to(a0.dtype) torch.ones_like({x},dtype=torch.int64) torch.full_like({x},3) {x}.new_tensor([1,2])
{x}.new_full((2,),{n}) torch.empty_like({x}).fill_(1) torch.empty({x}.shape).copy_({x}) torch.scalar_tensor(2.5)*{x} torch.asarray({x}) {x}.view(torch.int32)
torch.tril_indices(3,3)[0] torch.logspace(0,1,3) torch.complex({x},{x}).abs() torch.view_as_real(torch.complex({x},{x})) torch.fft.fft({x}).real
torch.linalg.inv({x}@{x}.mT+torch.eye({x}.shape[-2])) torch.polar({x}.abs(),{x}).imag torch.angle({x})
"""
WRITE = """
add_(1) mul_(2) mul_(0.5) neg_() abs_() zero_() fill_(0.25) clamp_(-1,1) relu_() sigmoid_() add_({y}) mul_({y}) copy_({y}) sub_({y},alpha=2) masked_fill_({x}>0,0.5)
round_() exp_().clamp_(max=5) div_({y}.abs()+1) fill_diagonal_(0.5) index_fill_({d},torch.tensor([{k}]),1) index_add_({d},torch.tensor([{k}]),{x}.narrow({d},{k},1).clone())
scatter_({d},torch.zeros_like({x},dtype=torch.int64),0.5) scatter_add_({d},torch.zeros_like({x},dtype=torch.int64),{x}.clone()) lerp_({y},0.5) tril_() floor_()
addcmul_({y},{y}) masked_fill_({y}.bool(),2) cumsum_(-1) t_() unsqueeze_(0) squeeze_({d}) transpose_({d},{f}) masked_scatter_({x}>0,{x}.clone().reshape(-1))
index_copy_({d},torch.tensor([{k}]),{x}.narrow({d},0,1).clone()*2) put_(torch.tensor([0]),{x}.reshape(-1)[:1].clone()+1)
"""
THROUGH = """
{x} {x} {x} {x}.select({d},{k}) {x}[...,::2] {x}.transpose({d},{f}) {x}.narrow({d},{k},1) {x}.view(-1) {x}.diagonal() {x}.T {x}.unsqueeze(0) {x}[None].squeeze(0)
{x}.detach() {x}.as_strided((2,),(1,))
"""
ASSIGN = """
{x}[{k}]=1 {x}[{k}]=0.5 {x}[{k}]={y} {x}[{k}]={x}[0]*2 {x}[...,::2]+=1 {x}[...,::2]+={x}[...,::2].clone() {x}[{x}>0]=0.25 {x}[torch.tensor([0,0])]=2 {x}[...,{k}:]*=3
{x}+={y} {x}*=2 {x}[torch.tensor([0,{k}])]+=1 {x}[:,0]={y} {x}[...]={y} {x}.index_put_((torch.tensor([0,0]),),torch.ones((),dtype={x}.dtype),accumulate=True)
"""
BLOCK = (
    "with torch.no_grad(): {v} = {x} * 2",
    "with torch.no_grad(): {x}.add_(1)",
    "with torch.enable_grad(): {v} = {x}.exp()",
    "with torch.autocast('cpu', torch.bfloat16): {v} = {x} @ {x}.mT",
    "{v} = [{x} + i for i in range(3)][-1]",
    "{v} = {x} if {x}.dim() > 1 else {x} * 2",
    "{v} = torch.utils.checkpoint.checkpoint(lambda q: q.sin() * 2, {x}, use_reentrant=False)",
    "{v} = {x}.data * 2",
    "{v} = sum([{x}, {x}, {y}])",
    "{v} = {x}; {v} = {v}.add_(1) if {v}.dtype.is_floating_point else {v} + 1",
)
WIDE = """
{x}.nanmedian({d})[0] {x}.median({d}).indices {x}.mode({d})[1] {x}.kthvalue(({n}+1)//2,{d})[0] {x}.kthvalue({n},{d}).indices {x}.quantile(0.7) {x}.median()
{x}.nanmean() {x}.nansum() {x}.nansum(dtype=torch.float64) {x}.cummin({d})[0] {x}.cummax({d})[1] {x}.cummin({d}).indices {x}.topk(({n}+1)//2,{d})[0]
{x}.msort() torch.aminmax({x},dim={d})[1] {x}.argmin({d},keepdim=True) {x}.argmax() {x}.all({d},keepdim=True) {x}.any() {x}.prod()
{x}.prod({d},dtype=torch.float64) {x}.sum(({d},{f})) {x}.mean(dtype=torch.float64) {x}.amax(()) {x}.amin() {x}.amax((0,-1),keepdim=True) {x}.var()
{x}.std(({d},{f}),keepdim=True) torch.var_mean({x},correction=0)[0] torch.logsumexp({x},(0,-1)) {x}.norm(p=0) {x}.norm(p=3,dim={d}) torch.linalg.norm({x})
torch.linalg.norm({x},'nuc') torch.linalg.matrix_norm({x},1) torch.trapezoid({x},dx=0.5) {x}.cumsum({d},dtype=torch.int32) {x}.count_nonzero()
{x}.diff(n=2,dim={d}) {x}.softmax({d},dtype=torch.float64) {x}.log_softmax({d},torch.float32) {x}.sum({d},dtype=torch.int32) {x}.sum({d},dtype=torch.float16)
{x}.float().histc(5) torch.renorm({x},1,{d},0.5) {x}.cumprod({d},dtype=torch.float64) torch.special.logsumexp({x},{d}) {x}.max({d},keepdim=True)[1]
{x}.min({d}).indices {x}.sum({d}).argmax() {x}.max()-{x}.min() {x}.nansum(({d},{f})) {x}.std(correction=3) {x}.float().std_mean() {x}.cumsum({d}).cumsum({f})
{x}.cumsum({d})[...,-1] {x}.bool().sum({d}) {x}.bool().prod({d}) {x}.bool().cumsum({d}) {x}.bool().any({d}) {x}.bool().amax({d}) {x}.bool().argmax({d})
{x}.to(torch.uint8).sum() {x}.to(torch.int8).sum({d}) {x}.to(torch.uint8).prod({d}) {x}.to(torch.int8).cumsum({d}) {x}.to(torch.int16).amin({d})
{x}.to(torch.uint8).argmin({d}) {x}.long().cumprod({d}) {x}.to(torch.int32).max({d})[1] {x}.bool().long().sum() {x}.to(torch.uint8).cumprod({d})
{x}.to(torch.int8).min({d})[0] {x}.half().sum({d}) {x}.half().mean() {x}.half().var({d}) {x}.bfloat16().cumsum({d}) {x}.bfloat16().softmax({d})
{x}.bfloat16().logsumexp({d}) {x}.half().norm({d})

{x}//({y}+10) {x}//-3 {x}%-3 {x}.remainder(-2) {x}.fmod(-3) -7%({x}.abs()+1) 5//({x}.abs()+1) torch.fmod({x},{y}) {x}.remainder({y}) {x}%{y}
{x}.floor_divide({y}) {x}/0 {x}*float('nan') {x}.round(decimals=1) {x}.round(decimals=-1) {x}<<{y}.abs().clamp(max=3) {x}>>{y}.abs().clamp(max=7)
1<<{x}.abs().clamp(max=4) {x}&3 {x}|1 {x}^5 ~({x}>0) {x}.logical_xor({y}) torch.lcm({x},{y}) {x}**0.5 {x}**-1 {x}**{y} 0**{x} (-2)**{x} {x}.pow(2.5) True+{x}
{x}+True {x}*2.5 {x}>0.5 {x}==True 2.5>{x} {x}!=False {x}.clamp(min={y}) {x}.clamp({y},{y}+1) {x}.clamp(max=2) {x}.clip(-1.5,None) {x}.clamp(2,-1)
{x}.clamp(float('nan'),1.) torch.sgn({x}) {x}.positive() {x}.absolute() torch.float_power({x},2) {x}.ldexp(torch.tensor([2])) torch.frexp({x})[1]
torch.frexp({x}).mantissa torch.copysign({x},-1) torch.where({x}>0,{x},{y}) torch.where({x}>0,1,{x}) torch.where({x}>0,1.5,0) torch.lerp({x},{y},{x})
{x}.addcmul({y},{x},value=2) {x}.logit(0.1) {x}.acos() {x}.asin() {x}.acosh() {x}.atanh() {x}.tan() {x}.log() {x}.log10() {x}.log2() {x}.erfc() {x}.erfinv()
{x}.abs().add(1).digamma() torch.special.i0({x}) torch.special.i1({x}) torch.special.i1e({x}) torch.special.erfcx({x}) torch.special.round({x})
torch.xlogy({x},{y}) torch.logaddexp2({x},{y}) torch.rad2deg({x}) torch.isposinf({x}) torch.isneginf({x}) torch.isinf({x}) torch.isreal({x})
{x}.not_equal({y}) torch.greater({x},{y}) {x}.less_equal(1) F.softplus({x},2,1.5) F.elu({x},0.5) F.hardshrink({x},0.3) F.threshold({x},0.5,-1) F.glu({x},{d})
F.hardtanh({x},-0.2,0.9) F.leaky_relu({x},-0.2) F.celu({x},1.5) F.softshrink({x},0.2) {x}.atan2({y}) {x}.arctan2({y}) {x}.fmax({y}) {x}.fmin({y})
{x}.maximum({y}) {x}.logaddexp({y}) {x}.exp2() {x}.fix() {x}.hypot({y}) torch.square({x}) {x}.sub({y},alpha=2) torch.add({x},{y},alpha=-1)
torch.add({x},1,alpha=3) torch.rsub({x},2,alpha=3) torch.sub(2,{x})

{x}+torch.tensor(2.5) torch.tensor(2)-{x} {x}/torch.tensor(2) {x}.sum()*{y} {x}.mean()+{x}.to(torch.int32) {x}.to(torch.int8)+{y} {x}.to(torch.int8)*2
{x}.to(torch.int16)*300 {x}.to(torch.int8)*100 {x}.bool()+1 {x}.bool()*{y} {x}.bool()/2 {x}.bool().float()-0.5 {x}.bool()+{y}.bool() {x}.bool()*2.5
{x}.bool()&{y}.bool() {x}.abs().byte()//2 -{x}.abs().to(torch.uint8) {x}.to(torch.int64)/3 {x}.long().float() {x}.long()*{x} {x}.double()*{y} {x}.half()+{y}
{x}.bfloat16()*{y}.half() {x}.half()*{y}.bfloat16() {x}.half()+1e5 {x}.half()*1e-8 {x}.bfloat16()+0.001 {x}.bfloat16()//0.3 {x}.half()%0.3 {x}.half().exp()
{x}.bfloat16().sigmoid() {x}.half().pow(3) {x}.half()**{y} {x}.to(torch.int32)*2**30 {x}.to(torch.int32)+2**31 {x}.long()*2**62 {x}.long()-2**63
{x}.to(torch.int8)+127 {x}.to(torch.int8)//-1 {x}.to(torch.int8)%-3 {x}.to(torch.int8).abs() {x}.to(torch.int8)<<6 {x}.to(torch.int8)>>2
{x}.to(torch.int16).neg() {x}.abs().to(torch.uint8)-5 {x}.abs().to(torch.uint8)<<7 {x}.abs().to(torch.uint8)**2 {x}.to(torch.int32)**2
{x}.to(torch.int32).float().sqrt() {x}.to(torch.int32).sqrt() {x}.to(torch.int32).sigmoid() {x}.bool().exp() torch.maximum({x}.to(torch.int32),{y})
torch.cat([{x}.half(),{x}.long()]) {x}.to(torch.int16).clamp(-1.5,1.5) {x}.to(torch.int32).clamp({y},2*{y}) {x}.detach().abs().to(torch.uint16)
{x}.detach().view(torch.uint8) {x}.detach().to(torch.float8_e4m3fn) {x}/{x}.numel() {x}.new_tensor(2)*{y} {x}*torch.finfo(torch.float32).eps {x}+{x}.dim()
torch.full_like({x},2)/{y} torch.arange({n})/3 torch.arange(0,1,0.3)*{x}.sum() torch.arange({n},0,-1) torch.arange(1.5,{n}+2) torch.logspace(-1,1,4)
torch.full((2,),True) torch.full((2,2),3) torch.eye({n},3) torch.zeros_like({x})-0.0 torch.arange({n}).to(torch.uint8)*200 torch.tensor([1,2.5])*{x}.sum()
torch.tensor(True)+{x} ({x}>0)+({y}>0) ({x}>0)*1.0 ({x}>0).sum()*0.5 ({x}>0).float().mean() ({x}>0)^({y}>0) ({x}>0).to({x}.dtype)*{y} ({x}>0)==({y}>0)
({x}>0)<({y}>0) torch.logical_and({x}>0,{y}) ~({x}>0)&({y}<1) ({x}>0).int()-1 ({x}>0).long()*{x}.shape[-1]

torch.complex({x},{x}).angle() torch.complex({x},{x}).exp().imag torch.complex({x},{x}).sqrt().real torch.complex({x},{x}).sum({d}).abs()
torch.fft.fft({x},dim={d}).abs() torch.fft.ifft({x}).imag torch.fft.fftn({x}).abs() torch.fft.rfft2({x}).real torch.fft.hfft({x})
torch.fft.ifftshift({x},dim={d}) torch.fft.fftfreq({n}) torch.complex({x},{x})+1 torch.complex({x},{x}).conj() torch.complex({x},{x}).conj()*2
torch.complex({x},{x}).mean({d}) torch.complex({x},{x}).reshape(-1).flip(0) torch.complex({x},{x})[...,:1].imag torch.complex({x},{x}).abs().sum()
torch.complex({x},{x}).pow(2).imag torch.complex({x},{x})==1 torch.complex({x},{x}).isnan() {x}+1j {x}*1j {x}-2j*{x} {x}.to(torch.complex64).real
{x}.to(torch.complex128)*{x} torch.view_as_real({x}.to(torch.complex64)) torch.polar({x}.abs(),{x}) torch.complex({x},{x}).adjoint()
torch.complex({x},{x}).prod() torch.complex({x},{x}).cumsum({d}).real torch.real({x}*1j) torch.stack([{x}*1j,{x}*1j])[0].imag torch.where({x}>0,{x}*1j,{x}*2)
torch.cat([{x}*1j,{x}*2j],{d}).imag ({x}*1j).mT.imag ({x}*1j).sigmoid().real ({x}*1j).tanh().imag torch.sgn({x}+1j*{x}) torch.fft.rfft({x},n=4).abs()
torch.fft.irfft({x}+1j,n=5) torch.fft.fft2({x}).abs().sum() torch.fft.fft({x}.double()).imag torch.linalg.matrix_exp({x}@{x}.mT*0.01)
torch.linalg.matrix_rank({x}) torch.linalg.vecdot({x},{x}) torch.linalg.vecdot({x},{x},dim={d}) torch.linalg.eigh({x}@{x}.mT)[0] torch.linalg.lu({x})[2]
torch.einsum('ii->i',{x}@{x}.mT) torch.einsum('ii',{x}@{x}.mT) torch.einsum('ij->ji',{x}) torch.einsum('bij,bkj->bik',{x},{x}) torch.einsum('...i->...',{x})
torch.einsum('ij,ij->',{x},{x}) torch.einsum('i,j->ij',{x},{x}) torch.einsum('bij,bij->b',{x},{x}) torch.einsum('bi,bj->bij',{x},{x})
torch.einsum('ij,j->i',{x},{x}[0]) torch.einsum('ijk->kji',{x}) torch.einsum('bhid,bhjd->bhij',{x},{x}) torch.einsum('i...->...',{x})
torch.cdist({x},{x},p=1.0) torch.cdist({x},{x},p=float('inf')) torch.cdist({x},{x},p=3.0) torch.cdist({x},{x}+1) torch.cdist({x},{x},p=0.0) F.pdist({x},p=1.0)
torch.linalg.diagonal({x}) torch.linalg.matrix_norm({x},-1) torch.linalg.matrix_norm({x},2) {x}@{x}.reshape(-1)[:{x}.shape[-1]]
{x}.reshape(-1)[:{x}.shape[-2]]@{x} {x}.mT@{x}.mT.mT {x}.flip(0)@{x}.mT ({x}*2)@({x}.mT+1) {x}@{x}.mT@{x} ({x}@{x}.mT).relu()+{x}[...,:1]
({x}@{x}.mT).softmax(-1)@{x} F.linear({x},{x}) F.linear({x},{x}.flip(0),{x}[:,0]) torch.kron({x},{y}) torch.tensordot({x},{x},([{d}],[{d}]))
torch.tensordot({x},{x},0) torch.inner({x},{y}) torch.matmul({x},{x}[0]) torch.matmul({x}[0],{x}.mT) torch.cov({x},correction=0) torch.trapz({x})
torch.cross({x}[...,:3],{y}[...,:3],-1) torch.linalg.vander({x}[...,:3]) torch.ormqr({x}@{x}.mT,{x}[...,0],{x})

{x}.index_select({d},torch.arange({n}).flip(0)) {x}.gather({d},{x}.argsort({d},stable=True)) {x}.scatter({d},{x}.argsort({d},stable=True),{x})
{x}.scatter_add({d},{x}.argsort({d},stable=True)//2,{x}) {x}.scatter_reduce({d},{x}.argsort({d},stable=True)//2,{x},'amin')
{x}.scatter_reduce({d},{x}.argsort({d},stable=True)//2,{x},'sum') {x}.index_reduce({d},torch.arange({n})//2,{x},'amin')
{x}.index_reduce({d},torch.arange({n})//2,{x},'prod') {x}.index_add({d},torch.arange({n})//2,{x},alpha=2) {x}.index_copy({d},torch.arange({n}).flip(0),{x})
{x}.index_fill({d},torch.tensor([{k}]),2) {x}.index_put((torch.tensor([0,-1]),),{x}[0]) {x}.index_put((torch.tensor([0,-1]),),{x}[:1],accumulate=True)
{x}.take(torch.arange(4).view(2,2)%{x}.numel()) torch.take_along_dim({x},torch.tensor([0,0])) {x}.put(torch.tensor([0,-1]),{x}.reshape(-1)[:2])
{x}.put(torch.tensor([0,0]),{x}.reshape(-1)[:2],accumulate=True) {x}[None,...,0] {x}[...,-1:] {x}[::2] {x}[True] {x}[[0,-1]] {x}[...,[0,0]] {x}[:,None,[0]]
{x}[torch.tensor([[0],[-1]]),torch.tensor([0,0])] {x}[torch.tensor([0]),:,torch.tensor([0])] {x}[torch.tensor([0,-1]),None] {x}[:,torch.tensor([[0,-1]])]
{x}[...,None,0] {x}[-1] {x}[...,::3] {x}[1:,...,:-1] {x}.masked_scatter({x}>0,{x}.flip({d})) {x}.masked_scatter({y}>0,torch.arange(500,dtype={x}.dtype))
torch.bucketize({x}.detach().sum(),torch.arange(3.)) torch.isin({x},{y}) torch.isin({x},1,invert=True)
F.one_hot({x}.detach().float().nan_to_num(0,0,0).long().abs()%3) F.one_hot({x}.detach().float().nan_to_num(0,0,0).long().abs()%3,5)
torch.cartesian_prod({x}.reshape(-1)[:3],{y}.reshape(-1)[:2]) {x}.repeat_interleave(3) {x}.repeat_interleave(torch.tensor([2]),{d},output_size=2*{n})
torch.slice_scatter({x},{x}.narrow({d},0,({n}+1)//2),{d},0,None,2) torch.diagonal_scatter({x},{x}.diagonal(1)*2,1)
torch.slice_scatter({x},{x}.narrow({d},{k},{n}-{k})*2,{d},{k}) torch.as_strided_scatter({x},{x}.reshape(-1)[:2]*3,(2,),(1,))
torch.index_select({x},{d},torch.tensor({k})) {x}.gather({d},torch.zeros([1]*{rank},dtype=torch.int64)) F.embedding(torch.arange({n})%{x}.shape[0],{x})
{x}[{x}.argmax(0).clamp(max={x}.shape[0]-1)] {x}.scatter({d},torch.zeros([1]*{rank},dtype=torch.int64),5)
{x}.scatter({d},{x}.argsort({d},stable=True),2,reduce='multiply') torch.tril_indices(3,{n}) {x}.where({x}>0,{y}) {x}.narrow_copy({d},{k},1)
torch.scatter({x},{d},{x}.argsort({d},stable=True),0.5) {x}[...,{x}.shape[-1]//2:] torch.nonzero_static({x}.detach(),size=3)
torch.combinations({x}.reshape(-1)[:4],3) torch.unique_consecutive({x}.detach(),return_inverse=True)[1]

{x}.flip(({d},{f})) {x}.flipud() {x}.fliplr() {x}.roll((1,-2),({d},{f})) {x}.roll(3) {x}.rot90(2) {x}.unfold({d},2,3) {x}.unfold({d},2,1).sum(-1)
{x}.unfold({d},2,1).contiguous() {x}.unfold({d},2,1)*2 {x}.unfold({d},2,1).amax({d}) {x}.as_strided((2,2),(2,1),1) {x}.repeat(2,*[1]*{rank}) {x}.tile((2,1))
{x}.reshape(-1,1) {x}.unflatten({d},(1,-1)) {x}.squeeze(({d},{f})) {x}.ravel() {x}.diagonal(1) {x}.diag() torch.diagflat({x}) {x}.diag_embed(1) {x}.tril(-1)
{x}.triu(2) torch.tensor_split({x},3,{d})[1] {x}.split([1,{n}-1],{d})[1] {x}.vsplit(1)[0] {x}.dsplit(1)[0] torch.atleast_3d({x}) {x}.expand_as({y})
{x}.sum_to_size({y}.shape) {x}.H {x}.narrow({d},0,0) {x}[:0] {x}[...,:0].sum(-1) torch.cat([{x}[:0],{x}]) {x}[:0].mean() {x}[:0].prod(0)
{x}[...,:0].softmax(-1) {x}[:0].cumsum(0) {x}[:0].any() {x}[:0].all(0) {x}[:0].std() {x}[:0]*2+1 {x}[:0].logsumexp(0) {x}[:0].amax(-1) {x}[...,:0].norm()
{x}[:0].argsort(0) {x}[:0].flip(0) {x}[:0].reshape(0,-1,1)if({x}.numel()<0)else({x}[:0]) torch.cat([{x}[:0],{x}[:0]]) torch.stack([{x}[:0],{x}[:0]])
F.pad({x}[:0],(1,1)) F.layer_norm({x}[:0],{x}.shape[-1:]) F.mse_loss({x}[:0],{x}[:0]) {x}.sum().expand(3) {x}.sum().reshape(1,1)
{x}.reshape(-1)[0].expand(2,2) {x}.select({d},{k}).unsqueeze(0) {x}.transpose({d},{f}).reshape(-1) {x}.permute({order}).contiguous()
{x}.permute({order}).clone() {x}.transpose({d},{f}).flatten() {x}.mT.sum(-1) {x}.mT.softmax(-1) {x}.flip({d})[...,::2] {x}.roll(1,{d})-{x}
torch.cat([{x}[...,:1],{x}],-1) torch.cat([{x},{x}.flip(0)]) torch.stack([{x},{y}]) torch.block_diag({x},{y}) torch.hstack([{x},{x}])
torch.row_stack([{x},{x}]) F.pad({x},(1,0)) F.pad({x},(0,0,1,0),value=2) F.pad({x},(-1,0)) F.pad({x},(2,2),mode='circular') {x}.movedim(-1,0)
{x}.moveaxis(({d},),({f},)) {x}.unbind({d})[-1] {x}.split(1,{d})[{k}] {x}.chunk(3,{d})[0] torch.ravel({x}) torch.triu_indices(3,3).sum()

F.interpolate({x},size=(3,7),mode='bicubic') F.interpolate({x},scale_factor=(1.5,0.7)) F.interpolate({x},scale_factor=1.7,mode='bilinear')
F.interpolate({x}[None],size=(2,3,4),mode='trilinear') F.interpolate({x},size=(2,3),mode='area') F.interpolate({x}[None],size=3)
F.interpolate({x},scale_factor=3,mode='nearest-exact') F.interpolate({x}[None],scale_factor=2) F.interpolate({x},size=5)
F.interpolate({x},size=6,mode='linear',align_corners=True) F.interpolate({x},size=(1,1),mode='bilinear') F.unfold({x},(2,1),dilation=2,padding=1,stride=2)
F.unfold({x},3,padding=1) F.avg_pool3d({x}[None],2,1,padding=1) F.max_pool1d({x},2,stride=1,dilation=2,padding=1) F.adaptive_max_pool3d({x}[None],2)
F.adaptive_avg_pool3d({x}[None],(1,2,3)) F.lp_pool1d({x},1,2,ceil_mode=True) F.lp_pool2d({x},2.5,2) F.max_pool2d({x},2,ceil_mode=True)
F.max_pool2d({x},(3,2),(1,2),(1,1),(1,1)) F.max_pool2d({x},2,1,0,2) F.avg_pool2d({x},(2,1)) F.avg_pool2d({x},3,1,1) F.avg_pool2d({x},3,2,0,True)
F.avg_pool1d({x},3,2,1,True,False) F.max_pool3d({x}[None],2,1) F.max_pool2d({x},3,1,1,return_indices=True)[1] F.max_pool1d({x},3,2,1,return_indices=True)[1]
F.adaptive_max_pool2d({x},3,return_indices=True)[1] F.adaptive_avg_pool2d({x},(None,2)) F.adaptive_avg_pool2d({x},1) F.adaptive_avg_pool2d({x},7)
F.adaptive_max_pool2d({x},1) F.adaptive_avg_pool1d({x},7) F.adaptive_max_pool1d({x},1) F.max_unpool1d(*F.max_pool1d({x},2,return_indices=True),2)
F.conv2d({x}[0],torch.ones(2,{c},1,1,dtype={x}.dtype)*0.1) F.batch_norm({x},None,None,torch.ones({c})*2,None,True) F.group_norm({x},{c})
F.layer_norm({x},{x}.shape[-2:]) F.layer_norm({x},{x}.shape,eps=0.1) F.rms_norm({x},{x}.shape[-2:]) F.local_response_norm({x},4,0.1,0.5,2.)
F.pixel_shuffle({x}.repeat(1,9,1,1),3) F.channel_shuffle({x}.repeat(1,2,1,1),2) F.triplet_margin_with_distance_loss({x},{x}+1,{x}.flip(0))
F.kl_div({x},{y}.softmax(-1),reduction='batchmean') F.kl_div({x},{y},reduction='sum',log_target=True) F.smooth_l1_loss({x},{y},beta=0.3,reduction='none')
F.smooth_l1_loss({x},{y},beta=0.0) F.huber_loss({x},{y},delta=0.5) F.mse_loss({x},{y},reduction='none') F.l1_loss({x},{y})
F.soft_margin_loss({x},{y}.sign(),reduction='none') F.margin_ranking_loss({x},{y},{x}.sign(),margin=0.3) F.embedding_bag(torch.tensor([[0,0]]),{x},mode='max')
F.gumbel_softmax({x},0.5,True,dim={d}) F.dropout1d({x},0.5) F.dropout3d({x}[None],0.5) F.alpha_dropout({x},0.3,True) F.rrelu({x},training=True)
torch.rand({n})*{x}.sum() torch.randn_like({x})+{x} torch.randint(0,5,({n},))+1 torch.randint_like({x},3) torch.randperm({n})
torch.normal({x}.detach(),{x}.detach().abs()+1) torch.bernoulli({x}.detach().sigmoid(),0.3) torch.poisson({x}.detach().abs())
torch.multinomial({x}.detach().abs()+0.1,1) {x}.detach().clone().exponential_() {x}.detach().clone().uniform_(-1,1) {x}.detach().clone().normal_(1,2)
{x}.detach().clone().random_(3) {x}.detach().clone().bernoulli_(0.3) {x}.detach().clone().geometric_(0.5) {x}.detach().clone().cauchy_()
{x}.detach().clone().log_normal_() torch.distributions.Normal({x}.detach(),1.).log_prob({y}) F.softmax({x},{d},dtype=torch.float64) F.log_softmax({x}*100,{d})
F.glu({x}.repeat(*[2]*{rank}),{d}) F.cosine_similarity({x},{y},{d},eps=0.5) F.pairwise_distance({x},{y},p=1.0)
F.pairwise_distance({x},{y},p=float('inf'),keepdim=True) F.normalize({x},dim=0)

torch.arange({n},out=torch.empty(0)) torch.linspace(0,1,{n},out=torch.empty(0)) {x}.clone().add_({y}) {x}.clone().mul_({y}).sub_(1) {x}.clone().clamp_(-1,1)
{x}.clone().T.add_(1) {x}.clone()[0].add_(1) {x}.clone().fill_(2) {x}.clone().zero_() {x}.clone().copy_({y}) {x}.clone().masked_fill_({y}>0,3)
{x}.clone().cumsum_({d}) {x}.clone().transpose_({d},{f}).add_(1) {x}.clone().squeeze_().mul_(2) {x}.clone().tril_() {x}.clone().pow_(2)
{x}.clone().floor_divide_(2) {x}.clone().remainder_(2) {x}.clone().fmod_(1.5) {x}.clone().lerp_({y},0.3) {x}.clone().addcmul_({y},{y},value=2)
{x}.clone().ge_(0) {x}.clone().eq_({y}) {x}.clone().bitwise_and_(3) {x}.clone().logical_not_() {x}.clone().nan_to_num_() {x}.clone().sigmoid_()
{x}.clone().round_() {x}.clone().neg_().abs_() {x}.clone().div_({y}.abs()+1) {x}.clone().div_(2,rounding_mode='floor') {x}.clone().true_divide_(3)
{x}.clone().atan2_({y}) {x}.clone().copysign_({y}) {x}.clone().hypot_({y}) {x}.clone().erfinv_() {x}.clone().renorm_(2,{d},1.) {x}.clone().fill_diagonal_(3)
{x}.clone().fill_diagonal_(2,wrap=True) {x}.clone().masked_scatter_({x}>0,{x}.flip(0)) {x}.clone().swapaxes_(0,-1) {x}.clone().relu_()
F.relu({x}.clone(),inplace=True) F.elu({x}.clone(),inplace=True) F.hardtanh({x}.clone(),inplace=True) F.silu({x}.clone(),inplace=True)
F.dropout({x}.clone(),0.4,True,True) F.leaky_relu_({x}.clone(),0.3) F.threshold({x}.clone(),0.1,0.4,inplace=True) F.hardswish({x}.clone(),inplace=True)
F.celu({x}.clone(),inplace=True) F.hardsigmoid({x}.clone(),inplace=True)
"""
"""More functions, by kind (a blank line apart), for `--wide`: reductions, arithmetic, promotion, special, indices, views, networks, what is written."""
BETWEEN = "{x}.cpu() {x}.cpu()*2+{y} {x}+{x}.sum().cpu() {x}.cpu().to({y}.device) {x}.to({y}.device,torch.float64) {x}*torch.tensor(1.5,device='cpu') {x}[{x}.sum().isnan().cpu().long()*0]".split()
"""What programs on a device besides do with the CPU."""
UNORDERED = "torch.scatter({x},{d},torch.zeros_like"
"""Different numbers for one place: which of them stays is not said on a device."""
MAKERS = (
    "tensor zeros ones full empty arange eye linspace logspace rand randn randint randperm scalar_tensor tril_indices triu_indices".split()
)
# the tables of expressions, as often as they are chosen
EXPRESSIONS = [
    table.split()
    for table, times in (
        *((UNARY, 4), (BINARY, 5), (VIEW, 5), (REDUCE, 5), (MATRIX, 3), (NETWORK, 3)),
        *((INDEX, 2), (JOIN, 2), (MAKE, 2), (LAYERS, 3), (SPECIAL, 4)),
    )
    for _ in range(times)
]


@dataclass
class Program:
    """`inputs(double)` makes the arguments anew; with `double`, float32 ones in float64, which tells rounding from errors. On `device` if that is named, with all that the lines make."""

    seed: int
    specs: list[tuple[tuple[int, ...], str, str, bool]]  # shape, dtype, layout, requires_grad
    lines: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    device: str = ""
    _memory: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def inputs(self, double: bool = False, shared: str = "") -> list[torch.Tensor]:
        """`shared`: "same" passes one tensor for all that look like it, "window" puts inputs of one type into one memory, where they overlap."""
        generator = torch.Generator().manual_seed(self.seed)
        made = [_tensor(generator, *spec, double, self.device or "cpu") for spec in self.specs]
        if shared == "same":
            return [next(t for t in made if (t.shape, t.dtype, t.stride()) == (own.shape, own.dtype, own.stride())) for own in made]
        if shared == "window":
            self._memory = {}
            return [self._window(made, i) for i in range(len(made))]
        return made

    def _window(self, made: list[torch.Tensor], i: int) -> torch.Tensor:
        """Inputs of one type, laid into the memory of all of them so that they overlap."""
        of_type = [k for k, t in enumerate(made) if t.dtype == made[i].dtype]
        memory = torch.cat([*(made[k].detach().reshape(-1) for k in of_type), made[i].new_zeros(8)])
        window = self._memory.setdefault(made[i].dtype, memory)
        start = self.seed % 3 * of_type.index(i)
        return window[start : start + made[i].numel()].view(made[i].shape)

    def source(self) -> str:
        parameters = ", ".join(f"a{i}" for i in range(len(self.specs)))
        body = "".join(f"    {on_device(line, self.device)}\n" for line in self.lines)
        return f"def fn({parameters}):\n{body}    return {', '.join(self.returned)},\n"

    def function(self) -> Any:
        namespace: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source(), f"/tmp/tensor_program_{self.seed}.py", "exec"), namespace)
        return namespace["fn"]


def on_device(line: str, device: str) -> str:
    """The statement where what torch's functions make is on `device`, if one is named."""
    if not device:
        return line
    tree = ast.parse(line)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).removeprefix("torch.")
        if name in MAKERS and not any(word.arg == "device" for word in call.keywords):
            call.keywords.append(ast.keyword("device", ast.Constant(device)))
        elif name == "autocast":
            call.args[0] = ast.Constant(device)
    return "; ".join(" ".join(ast.unparse(statement).split("\n    ")) for statement in tree.body)


def _tensor(
    generator: torch.Generator, shape: tuple[int, ...], name: str, layout: str, requires_grad: bool, double: bool, device: str
) -> torch.Tensor:
    dtype = getattr(torch, "float64" if double and name == "float32" else name)
    memory = tuple(reversed(shape)) if layout == "transposed" else tuple(2 * n for n in shape) if layout == "strided" else shape
    if dtype.is_floating_point:
        t = torch.randn(memory, generator=generator, dtype=torch.float64).to(dtype)
    elif dtype is torch.bool:
        t = torch.randint(0, 2, memory, generator=generator).bool()
    else:
        t = torch.randint(0 if dtype is torch.uint8 else -4, 5, memory, generator=generator).to(dtype)
    t = t.to(device)
    if layout == "transposed":
        t = t.permute(*reversed(range(len(shape))))
    elif layout == "strided":
        t = t[tuple(slice(None, None, 2) for _ in shape)]
    elif layout == "offset":
        t = torch.cat([t.new_zeros(3), t.reshape(-1)])[3:].view(shape)
    elif layout == "last" and len(shape) == 4:
        t = t.contiguous(memory_format=torch.channels_last)
    elif layout == "special" and dtype.is_floating_point:
        t.view(-1)[:: max(1, t.numel() // 3)] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])[len(shape) % 4]
    return t.detach().requires_grad_(requires_grad)


class Builder:
    """Grows a program by running its statements: on the CPU, where no index out of range is fatal, then on the device."""

    def __init__(self, seed: int, wide: bool = False, large: bool = False, device: str = "") -> None:
        self.random = r = random.Random(seed)
        self.expressions = EXPRESSIONS + 4 * [kind.split() for kind in WIDE.split("\n\n")] if wide else EXPRESSIONS
        if device:
            self.expressions = [[one for one in table if not one.startswith(UNORDERED)] for table in (*self.expressions, BETWEEN)]
        self.large, self.device = large, device
        base = self._shape()
        specs = []
        for i in range(r.choice([1, 2, 2, 3])):
            dtype = "float32" if i == 0 else r.choice(FLOATS) if r.random() < 0.75 else r.choice(INTEGERS)
            shape = base if r.random() < 0.5 else self._shape() if r.random() < 0.5 else tuple(n if r.random() < 0.7 else 1 for n in base)
            layout = r.choice(["", "", "", "transposed", "strided", "offset", "last", "special"])
            specs.append((shape, dtype, layout, dtype in FLOATS and r.random() < 0.6))
        self.program = Program(seed, specs)
        self.names = [f"a{i}" for i in range(len(specs))]
        self.values: dict[str, Any] = {}
        self.there: dict[str, Any] = {}  # the same on the device

    def _shape(self) -> tuple[int, ...]:
        rank = self.random.choice([1, 2, 2, 3, 3, 4])
        if self.large:
            return self.random.choice(LARGE[rank])
        return tuple(self.random.choice([1, 2, 3, 4, 5, 7, 8, 16, 17, 33] if rank < 3 else [1, 2, 3, 4, 5, 8, 9]) for _ in range(rank))

    def build(self, size: int) -> Program:
        lines = self.program.lines
        self._restart()
        for _ in range(size * 8):
            if len(lines) == size:
                break
            new = f"v{len(self.names)}"
            statement = self._statement(new)
            try:
                torch.manual_seed(0)
                exec(statement, self.values)
                made = self.values.get(new)
                if isinstance(made, torch.Tensor) and (
                    made.numel() > LARGEST * (50 if self.large else 1) or (not made.numel() and self.random.random() < 0.8)
                ):
                    raise ValueError("too large, or empty")
                if self.device:
                    exec(on_device(statement, self.device), self.there)
            except Exception:  # noqa: BLE001 - eager refuses: the statement is left out
                self._restart()
                continue
            lines.append(statement)
            if new in self.values:
                self.names.append(new)
        made_here = [name for name in self.names if name.startswith("v")]
        kept = [name for name in made_here if self.random.random() < 0.35][-5:]
        self.program.device = self.device
        self.program.returned = kept + [name for name in made_here[-1:] if name not in kept] or self.names[:1]
        return self.program

    def _restart(self) -> None:
        self.values = {"torch": torch, "F": F, **{f"a{i}": t for i, t in enumerate(self.program.inputs())}}
        there = replace(self.program, device=self.device, _memory={}).inputs() if self.device else []
        self.there = {"torch": torch, "F": F, **{f"a{i}": t for i, t in enumerate(there)}}
        for line in self.program.lines:
            exec(line, self.values)
            if self.device:
                exec(on_device(line, self.device), self.there)

    def _statement(self, new: str) -> str:
        r = self.random
        recent = self.names[-4:] if r.random() < 0.7 else self.names
        x, y = r.choice(recent), r.choice(self.names)
        t = self.values[x]
        dims = list(range(t.dim()))
        d = r.choice(dims or [0])
        n = t.shape[d] if dims else 1
        words = {"x": x, "y": y, "v": new, "d": d - t.dim() * r.randint(0, 1) if dims else 0, "f": r.choice(dims or [0]), "n": n}
        words.update(k=r.randrange(max(n, 1)), c=t.shape[1] if len(dims) > 1 else 1, rank=t.dim(), order=r.sample(dims, len(dims)))
        kind = r.random()
        if kind < 0.78:
            return f"{new} = {r.choice(r.choice(self.expressions)).format(**words)}"
        if kind < 0.84:
            return r.choice(BLOCK).format(**words)
        if kind < 0.88:
            return r.choice(ASSIGN.split()).format(**words)
        return f"{r.choice(THROUGH.split()).format(**words)}.{r.choice(WRITE.split()).format(**words)}"


def program_of(seed: int, size: int = 8, wide: bool = False, large: bool = False, device: str = "") -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Builder(seed, wide, large, device).build(size)
