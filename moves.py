"""One-off: move modules into packages and rewrite imports. Run in a worktree root."""
import re, subprocess, sys
from pathlib import Path
R=Path('.')
MOVES={
 # core
 'errors':'core.errors','spec':'core.dtypes','names':'core.names','graph':'core.graph',
 'formats.scheme':'core.int_scheme','layout':'core.row_order','shown':'core.shown','regular':'core.regular','roles':'core.roles',
 # checkpoint
 'header':'checkpoint.safetensors','checkpoint':'checkpoint.checkpoint','repo':'checkpoint.hub_cache','family':'checkpoint.family',
 'quantization':'checkpoint.quantization_config','integers':'checkpoint.integer_config','ignore':'checkpoint.ignore',
 # samples
 'calibration':'samples.request','calibrate.data':'samples.data','calibrate.samples':'samples.readers','calibrate.tokenizer':'samples.tokenizer',
 # plan
 'plan':'plan.plan','units':'plan.units','manifest':'plan.manifest',
 # matrices
 'weights':'matrices.stored','experts':'matrices.experts','linears':'matrices.linears','beside':'matrices.unquantized',
 'nvfp4_beside':'matrices.unquantized_nvfp4','formats.calibrated':'matrices.calibrated',
 # formats
 'formats.amx':'formats.amx.encode','formats.amx_codes':'formats.amx.calibrated_codes','formats.clip':'formats.amx.clip',
 'formats.packers':'formats.int_packed.packers','formats.rtn':'formats.int_packed.rounding','formats.w4a16':'formats.int_packed.w4a16','formats.int_config':'formats.int_packed.config',
 'formats.nvfp4':'formats.nvfp4.encode','formats.nvfp4_scale':'formats.nvfp4.scales','formats.nvfp4_config':'formats.nvfp4.config','relabel':'formats.nvfp4.relabel',
 # runtimes
 'consumers':'runtimes.consumers','kt':'runtimes.ktransformers',
 # passes
 'rows':'passes.fused_rows','nvfp4_weights':'passes.nvfp4_groups','input_scales':'passes.input_scales','stages':'passes.stages','pair':'passes.pair',
 # recipe
 'recipe':'recipe.recipe','foreign_recipe':'recipe.llmcompressor','foreign_options':'recipe.llmcompressor_options','yaml_lines':'recipe.yaml_lines',
 # validation
 'findings':'validation.findings','tasks':'validation.workers','validation':'validation.runner','diff':'validation.diff','reports':'validation.reports',
 # hub
 'card':'hub.card','hub.patience':'hub.retries',
 # contrib
 'plugins.sglang_prepared':'contrib.trtllm_gen.sglang_plugin','formats.trtllm_gen':'contrib.trtllm_gen.layout','formats.nvfp4_experts':'contrib.trtllm_gen.stacks',
 'passes.prepare':'contrib.trtllm_gen.prepare','passes.unprepare':'contrib.trtllm_gen.unprepare',
 'validators.prepared':'contrib.trtllm_gen.prepared_rules','validators._prepared_tasks':'contrib.trtllm_gen.prepared_tasks',
 # cli
 'cli':'cli.main','commands.options':'cli.options','commands.convert':'cli.convert','commands.calibration':'cli.calibration','commands.check':'cli.check',
 'commands.house':'cli.house','commands.kt':'cli.kt','commands.layout':'cli.layout','commands.nvfp4':'cli.nvfp4','commands.prepare':'cli.prepare',
 'commands.progress':'cli.progress','commands.stages':'cli.stages','commands.upload':'cli.upload','commands.w4a16':'cli.w4a16',
 'report':'cli.plan_report','demo':'cli.demo','sample':'cli.demo_checkpoint',
}
V='validators.'
for old,new in {
 '_decode':'reading.decode','_forms':'reading.forms','_matrices':'reading.matrices','_rows':'reading.rows','_results':'reading.results',
 '_quantization':'reading.quantization','_int_parts':'reading.int_parts','_nvfp4':'reading.nvfp4','_model':'reading.model','_quantizing':'reading.conversions',
 '_prepared':'reading.prepared','_sums':'weights.sums','_amx':'amx.reading',
 'structure':'headers.structure','shapes':'headers.shapes','counts':'headers.counts','projections':'headers.projections','quantization_config':'headers.quantization_config',
 'config_kept':'headers.config_kept','files_kept':'headers.files_kept','side_files':'headers.side_files','manifest_claims':'headers.manifest_claims','receipt':'headers.receipt',
 'conservation':'headers.conservation','gdn_stated':'headers.gdn_stated','nvfp4_headers':'headers.nvfp4_headers','pair':'headers.pair',
 'weights':'weights.weights','_compare':'weights.compare','_int_bounds':'weights.int_bounds','values':'weights.values','hashes':'weights.hashes','sources':'weights.sources',
 'tied_head':'weights.tied_head','shared_scales':'weights.shared_scales','zero_points':'weights.zero_points','group_index':'weights.group_index','packed_shapes':'weights.packed_shapes',
 'gdn_order':'weights.gdn_order','_gdn_rows':'weights.gdn_rows','nvfp4_scales':'weights.nvfp4_scales',
 'amx_client':'amx.amx_client','kt_forward':'amx.kt_forward','amx_codes':'amx.amx_codes','amx_source':'amx.amx_source','amx_weights':'amx.amx_weights','amx_headers':'amx.amx_headers',
 'logits':'model.logits','attribution':'model.attribution','_causes':'model.causes','_plain':'model.plain','_served':'model.served','_runs':'model.runs',
 'fp8_dequant':'kernels.fp8_dequant','gdn_fused':'kernels.gdn_fused','w4a16':'kernels.w4a16','nvfp4':'kernels.nvfp4','amx_tiles':'kernels.amx_tiles',
 'kernels':'kernels.device','kernels.amx':'kernels.triton.amx','kernels.fp8':'kernels.triton.fp8','kernels.gdn':'kernels.triton.gdn','kernels.nvfp4':'kernels.triton.nvfp4','kernels.w4a16':'kernels.triton.w4a16',
}.items():
    MOVES[V+old]=V+new
EXTRA=Path('/tmp/moves_extra.py')
if EXTRA.exists(): exec(EXTRA.read_text())

def run(*a): subprocess.run(a,check=True)

# 1. real folders inside, links at the top
Q=R/'qconvert'
for room in ('layouts','recipes','validators'):
    if (Q/room).is_symlink():
        run('git','rm','-q','--cached',f'qconvert/{room}'); (Q/room).unlink()
        run('git','mv',room,f'qconvert/{room}')
        (R/room).symlink_to(f'qconvert/{room}'); run('git','add',room)
if '--links-only' in sys.argv: sys.exit()

# 2. moves. Two phases through temporary names, as a package takes the name of a module.
def path_of(mod):
    p=Q/(mod.replace('.','/')+'.py')
    if p.exists(): return p
    d=Q/mod.replace('.','/')
    if d.is_dir(): return d
    return None
plan=[]
for old,new in MOVES.items():
    if old=='validators.kernels':
        src=Q/'validators/kernels/__init__.py'
    else:
        src=path_of(old)
    if src is None: print('absent',old); continue
    plan.append((old,new,src))
# directories moved whole: reports, card
tmp={}
for i,(old,new,src) in enumerate(sorted(plan,key=lambda t:-len(t[0]))):
    t=Q/f'__tmp{i}' if src.is_dir() else Q/f'__tmp{i}.py'
    run('git','mv','-k',str(src),str(t))
    tmp[old]=(t,new)
for old,(t,new) in tmp.items():
    dst=Q/new.replace('.','/')
    if not t.is_dir(): dst=dst.with_suffix('.py')
    dst.parent.mkdir(parents=True,exist_ok=True)
    run('git','mv',str(t),str(dst))
for gone in ('commands','plugins'):
    d=Q/gone
    if (d/'__init__.py').exists(): run('git','rm','-qf',str(d/'__init__.py'))
import shutil
for p in Q.rglob('__pycache__'): shutil.rmtree(p)
for d in sorted(Q.rglob('*'),key=lambda p:-len(p.parts)):
    if d.is_dir() and not d.is_symlink() and not any(d.iterdir()): d.rmdir()
DOC={
 'core':'What everything stands on: errors, dtypes, names, the lazy graph. Standard library only.',
 'checkpoint':'A Hugging Face checkpoint known from its headers: files, family, what its config states.',
 'samples':'What a calibration is asked for, and the samples it reads. No torch.',
 'plan':'What shall exist, proved to account for every source byte before any is read.',
 'matrices':'Every weight of a plan: where it is, in what form, how it is read.',
 'formats':'What a consumer loads: one folder a format.',
 'formats/amx':'AMXINT4 and AMXINT8, as kt-kernel reads them.','formats/int_packed':'INT4 and INT8 in I32 words: compressed-tensors\' and GPTQ\'s forms.',
 'formats/nvfp4':'NVFP4 in both dialects.',
 'runtimes':'What the programs that serve models take: facts read in their loaders, with versions.',
 'recipe':'Recipes: YAML in, passes out; llm-compressor\'s too.',
 'validation':'How validators are run, and what they say.',
 'validators/reading':'The reader of stored weights that all validators share.',
 'validators/headers':'Rules that read headers and small files.',
 'validators/weights':'Rules that read weights.','validators/amx':'Rules for folders of CPU experts.',
 'validators/model':'What transformers computes with both folders.',
 'validators/kernels':'Triton kernels compared with torch.','validators/kernels/triton':'The kernels, each beside a reference in torch. Imported where they run.',
 'contrib':'Experimental parts.','contrib/trtllm_gen':'Experts prepared for TensorRT-LLM\'s kernels: experimental.',
 'cli':'The command line: one subject a file.',
}
for d in sorted({p.parent for p in Q.rglob('*.py')}|{Q/'contrib'}):
    i=d/'__init__.py'
    if not i.exists() and d!=Q:
        rel=d.relative_to(Q).as_posix()
        d.mkdir(exist_ok=True)
        i.write_text(f'"""{DOC.get(rel,"")}"""\n')
        run('git','add',str(i))

# 3. imports
pat=re.compile(r'\bqconvert\.('+'|'.join(re.escape(k) for k in sorted(MOVES,key=lambda k:-len(k)))+r')\b(?!-)(?!\()')
def sub(m):
    # a.b.c where a.b moved: longest match first
    return 'qconvert.'+MOVES[m.group(1)]
FROM=re.compile(r'^( *)from qconvert\.([a-z_.0-9]+) import ([^\n(]+)\n',re.M)
def split_from(m):
    ind,base,names=m.groups()
    rest=[];out=[]
    for item in names.split(','):
        item=item.strip(); name,_,alias=item.partition(' as ')
        new=MOVES.get(f'{base}.{name}')
        if new is None: rest.append(item); continue
        pkg,_,last=new.rpartition('.')
        alias=alias or name
        # a marker keeps the new path from being rewritten again
        out.append(f"{ind}from QCONVERT.{pkg} import {last}"+("" if alias==last else f" as {alias}")+"\n")
    if rest: out.insert(0,f"{ind}from qconvert.{base} import {', '.join(rest)}\n")
    return ''.join(out)
files=subprocess.run(['git','ls-files'],capture_output=True,text=True,check=True).stdout.split('\n')
for f in files:
    p=R/f
    if not f or p.is_symlink() or not p.is_file(): continue
    if p.suffix in ('.py','.toml','.yml','.yaml') or p.name in('Makefile',):
        s=p.read_text()
        n=FROM.sub(split_from,s)
        n=pat.sub(sub,n)
        n=re.sub(r'^(\s*)from qconvert import errors\b',r'\1from qconvert.core import errors',n,flags=re.M)
        n=n.replace('from QCONVERT.','from qconvert.')
        if n!=s: p.write_text(n)
    elif p.suffix=='.md':
        pass
